"""The parts of `measure_cpu.py`: each takes loaded models, measures its arms in turn, adds a section to the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from measuring.llama import LlamaArm
from measuring.passes import PassTimer
from measuring.runs import PromptIds, Report, long_prompt, say
from measuring.timing import Decoded, Spread, decode, in_turn, ratio
from treeeagle_edge.bench.prompts import BenchPrompt
from treeeagle_edge.chat.answer import Answer
from treeeagle_edge.chat.session import Session
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.runtime import Runtime
from treeeagle_edge.sampling_params import SamplingParams

FOLLOW_UP = "Please say that again in two sentences."
T = TypeVar("T")


def verify_part(
    report: Report, runtimes: Mapping[int, Runtime], chosen: argparse.Namespace, text: Sequence[BenchPrompt]
) -> None:
    """What a verify pass of some rows costs, as a multiple of a pass of one row."""
    first = next(iter(runtimes.values()))
    prefix = long_prompt(first, text, chosen.prefix)
    timers = {
        bits: PassTimer(item.engine.target, item.engine.head, prefix) for bits, item in runtimes.items()
    }
    arms = {
        f"{bits}-bit, {rows}": partial(timer.verify, rows)
        for bits, timer in timers.items()
        for rows in chosen.rows
    }
    found = _repeat(arms, chosen.pass_repetitions, "verify passes")
    rows = []
    for count in chosen.rows:
        cells = [str(count)]
        for bits in timers:
            times = found[f"{bits}-bit, {count}"]
            cells += [f"{Spread.of(times).median * 1e3:.2f}", ratio(times, found[f"{bits}-bit, 1"]).text()]
        rows.append(cells)
    header = ["rows", *(cell for bits in timers for cell in (f"{bits} bits, ms", "to one row"))]
    note = (
        f"{chosen.prefix} tokens in the prefix; a pass with its logits and the greedy walk; medians over "
        f"{chosen.pass_repetitions} turns of 5 calls, quartiles in brackets"
    )
    report.section("Verify pass by rows", aligned_table(header, rows), note, data=found)


def decode_part(
    report: Report,
    runtimes: Mapping[int, Runtime],
    llamas: Mapping[int, LlamaArm],
    chosen: argparse.Namespace,
    prompts: Sequence[PromptIds],
) -> None:
    """Plain and tree decoding, and llama.cpp's decoding, of the same prompts in one run."""
    params = SamplingParams(max_tokens=chosen.tokens)
    arms: dict[str, Callable[[Sequence[int]], Decoded]] = {}
    for bits, runtime in runtimes.items():
        arms[f"plain {bits}"] = partial(_ours, runtime.engine, params, False)
        arms[f"tree {bits}"] = partial(_ours, runtime.engine, params, True)
    for bits, llama in llamas.items():
        arms[f"llama.cpp {bits}"] = partial(llama.answer, tokens=chosen.tokens)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    different = 0
    for turn in range(chosen.repetitions * len(prompts)):
        case = prompts[turn % len(prompts)]
        say(f"decoding {turn + 1}/{chosen.repetitions * len(prompts)}: {case.name}")
        answers = in_turn({name: partial(arm, case.ids) for name, arm in arms.items()}, turn)
        for name, answer in answers.items():
            speeds[name].append(answer.tps)
        different += sum(answers[f"plain {bits}"].ids != answers[f"tree {bits}"].ids for bits in runtimes)
    pairs = [(f"plain {bits}", f"llama.cpp {bits}") for bits in runtimes]
    pairs += [(f"tree {bits}", f"llama.cpp {other}") for bits in runtimes for other in llamas]
    pairs += [(f"tree {bits}", f"plain {bits}") for bits in runtimes]
    ratios = {f"{a} / {b}": ratio(speeds[a], speeds[b]) for a, b in pairs}
    absolute = aligned_table(
        ("arm, bits", "tokens/s, median (quartiles)"),
        [(name, Spread.of(values).text(1)) for name, values in speeds.items()],
        left=(0,),
    )
    relative = aligned_table(
        ("ratio", "median of ratios (quartiles)"),
        [(name, item.text(2, "x")) for name, item in ratios.items()],
        left=(0,),
    )
    note = (
        f"{len(prompts)} prompts x {chosen.repetitions}, {chosen.tokens} tokens each, greedy, end tokens ignored; "
        f"answers in which tree and plain differ: {different}"
    )
    report.section("Decoding", absolute + "\n\n" + relative, note, data={"tokens_per_second": speeds})
    report.verdict("answers in which tree and plain differ", different, 0, at_least=False)


def prefill_part(
    report: Report,
    runtimes: Mapping[int, Runtime],
    llamas: Mapping[int, LlamaArm],
    chosen: argparse.Namespace,
    text: Sequence[BenchPrompt],
) -> None:
    """Reading a long prompt, here and in llama.cpp."""
    ids = long_prompt(next(iter(runtimes.values())), text, chosen.prefill)
    params = SamplingParams(max_tokens=1)
    arms: dict[str, Callable[[], float]] = {}
    for bits, runtime in runtimes.items():
        for name, speculate in (("plain", False), ("with head", True)):
            arms[f"{name} {bits}"] = partial(_first_token, runtime.engine, params, speculate, ids)
    for bits, llama in llamas.items():
        arms[f"llama.cpp {bits}"] = partial(llama.prefill, ids)
    found = _repeat(arms, chosen.prefill_repetitions, "prefill")
    rows = []
    for name, times in found.items():
        other = found[f"llama.cpp {name.rsplit(maxsplit=1)[1]}"]
        speed = Spread.of([len(ids) / seconds for seconds in times])
        rows.append((name, speed.text(0), ratio(other, times).text(2, "x")))
    header = ("arm, bits", "tokens/s, median (quartiles)", "speed / llama.cpp of the same bits")
    note = (
        f"{len(ids):,} tokens from nothing to the first token; `with head` also writes the head's rows; "
        f"{chosen.prefill_repetitions} turns"
    )
    report.section("Prefill", aligned_table(header, rows, left=(0,)), note, data=found)


def second_turn_part(
    report: Report, runtimes: Mapping[int, Runtime], chosen: argparse.Namespace, text: Sequence[BenchPrompt]
) -> None:
    """Time to first token of a chat's second turn: with the first turn in the KV cache, and with an empty cache."""
    rows = []
    data = {}
    for bits, runtime in runtimes.items():
        chats = [_two_turns(runtime, item, chosen.first_answer) for item in text[: chosen.chats]]
        warm, cold = [item[0].ttft_s for item in chats], [item[1].ttft_s for item in chats]
        again = [item[0].prompt_tokens - item[0].cached_tokens for item in chats]
        rows.append(
            (str(bits), f"{Spread.of([float(item[0].prompt_tokens) for item in chats]).median:.0f}",
             f"{Spread.of([float(count) for count in again]).median:.0f}", Spread.of([s * 1e3 for s in warm]).text(1),
             Spread.of([s * 1e3 for s in cold]).text(1), ratio(cold, warm).text(1, "x"))
        )  # fmt: skip
        data[bits] = {"warm_s": warm, "cold_s": cold, "read_again": again}
    header = ("bits", "prompt tokens", "not in the cache", "first token, ms", "from nothing, ms", "gain")
    note = (
        f"{min(chosen.chats, len(text))} chats, first answers of up to {chosen.first_answer} tokens; the clock starts "
        "with the message, so rendering and tokenising count; medians and quartiles"
    )
    report.section("First token of a second turn", aligned_table(header, rows), note, data=data)


def _ours(engine: Engine, params: SamplingParams, speculate: bool, ids: Sequence[int]) -> Decoded:
    return decode(engine, ids, params, speculate=speculate)


def _first_token(engine: Engine, params: SamplingParams, speculate: bool, ids: Sequence[int]) -> float:
    return decode(engine, ids, params, speculate=speculate).ttft_s


def _two_turns(runtime: Runtime, prompt: BenchPrompt, tokens: int) -> tuple[Answer, Answer]:
    """The second turn's answers: with the first turn's KV in the pool, and with an empty pool."""
    stops = runtime.generation.stop_ids | runtime.tokenizer.stop_ids
    session = Session(runtime.engine, runtime.tokenizer)
    second = prompt.turns[1] if len(prompt.turns) > 1 else FOLLOW_UP
    runtime.engine.reset()
    _answer(session, prompt.turns[0], SamplingParams(max_tokens=tokens, stop_ids=stops))
    short = SamplingParams(max_tokens=4, stop_ids=stops)
    warm = _answer(session, second, short)
    session.undo()
    runtime.engine.reset()
    return warm, _answer(session, second, short)


def _answer(session: Session, text: str, params: SamplingParams) -> Answer:
    *_, last = session.ask(text, params)
    assert isinstance(last, Answer)
    return last


def _repeat(arms: Mapping[str, Callable[[], T]], turns: int, what: str) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {name: [] for name in arms}
    for turn in range(turns):
        say(f"{what} {turn + 1}/{turns}")
        for name, value in in_turn(arms, turn).items():
            found[name].append(value)
    return found
