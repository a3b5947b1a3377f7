"""A page with plans of well-known models on cards of three sizes, from shapes alone: `treeeagle profile --table`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from textwrap import dedent

from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware, imagine_gpu
from treeeagle_edge.planning.alternatives import alternatives
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.memory_plan import MemoryPlan
from treeeagle_edge.planning.model_shapes import PlannedModel
from treeeagle_edge.planning.run_plan import RunPlan, pick_profile, plan_run
from treeeagle_edge.planning.torch_bytes import head_bytes, step_bytes
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB, format_gb

MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2-7B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "openbmb/MiniCPM4-8B",
    "lmsys/vicuna-7b-v1.5",
    "lmsys/vicuna-13b-v1.3",
    "meta-llama/Llama-2-13b-chat-hf",
)
WIDTHS = {4: "NF4", 8: "int8", 16: "bf16"}
CONTEXTS = (2048, 8192, 32_768)  # tokens
CARDS = (12, 16, 24)  # GB
NONE = "–"
_RAM = 32 * GB  # memory of the computer with the card: its CPU may be an alternative
_INTRODUCTION = """\
    # What fits which card

    Bytes follow from shapes alone: nothing was loaded for this page, and nothing has to be to ask for your own case.

    ```
    treeeagle profile --gpu-memory 12 --model Qwen/Qwen3-8B --context 8192
    ```

    - **need**: GB (10^9 bytes) of weights, embedding and lm_head, the draft head that goes with the model if there is
      one, keys and values for the context and one tree, the workspace of the widest pass, and the CUDA graphs of
      rounds. Behind it, the cards on which that fits beside what is kept free for a desktop and the driver:
      {reserves}.
      "{none}": longer than the model's own context.
    - **longest**: tokens of context that fit the card, in bold where that is all the model has.
    - Weights are `--bits` 4, 8 and 16. int8 on CUDA (LLM.int8) buys room, not speed.

    The cards are taken as idle. On a real one the plan is held against the memory that is free at that moment, which is
    read and not assumed: `treeeagle profile` says how much that is.

    """
_NARROWER = """\

    ## Narrower heads

    - `--head-bits 8` or `4` stores the draft head in int8 or NF4. It is read once for each level of a tree. What it
      says decides about speed, never about the text.
    - `--lm-head-bits 8` stores the model's output matrix in int8. It is read in every step. Its logits are rounded, so
      that the text may differ from that of 16 bits.
    - Where lm_head is tied to the embedding (*), look-ups still need the 16 bits, and the int8 matrix is a copy: it
      costs memory and saves reading.

    GB, with layers at 4 bits and a context of {context:,} or all that the model has.

    """
_REFUSED = """\

    ## What is said where it does not fit

    At 8 bits, with a context of {context:,} or all that the model has, on the card with {card} GB. Nothing is loaded
    before the refusal.

    """


def plan_page() -> str:
    """The page `docs/plans.md`, in Markdown. It is the same on every machine."""
    cards = {size: _computer_with(size) for size in CARDS}
    reserves = ", ".join(f"{_reserve(card)} GB of {size}" for size, card in cards.items())
    lines = [dedent(_INTRODUCTION).format(reserves=reserves, none=NONE)]
    lines += [f"{row}\n" for row in _table(cards)]
    lines.append(dedent(_NARROWER).format(context=CONTEXTS[1]))
    lines += [f"{row}\n" for row in _narrower(cards[CARDS[0]])]
    lines.append(dedent(_REFUSED).format(context=CONTEXTS[1], card=CARDS[0]))
    lines += [f"{line}\n" for line in _refusals(cards[CARDS[0]])]
    return "".join(lines)


def planned(
    name: str,
    bits: int,
    context: int | None,
    card: Hardware,
    *,
    head_bits: int | None = None,
    lm_head_bits: int | None = None,
) -> RunPlan:
    """The plan of a known model with its head on `card`. context: None takes the one of the card's profile."""
    known = KNOWN_MODELS[name]
    settings = replace(_settings(name, bits, context), head_bits=head_bits, lm_head_bits=lm_head_bits)
    model = PlannedModel(name, known.config, known.head_name, known.head, on_disk=False)
    return plan_run(settings, pick_profile(settings, card), card, model)


def _settings(name: str, bits: int, context: int | None) -> RunSettings:
    # a card uses PyTorch's kernels; naming them avoids a search for native ones
    return RunSettings(model=name, bits=bits, context=context, kernels="torch")


def _computer_with(size: int) -> Hardware:
    """An imagined computer with an idle card of `size` GB."""
    cpu = Cpu("a processor", 8, 16, ("avx2",))
    return imagine_gpu(Hardware("cpu", "planned for", cpu, Ram(_RAM, _RAM, limited=False)), size)


def _reserve(card: Hardware) -> str:
    return f"{pick_profile(RunSettings(model=MODELS[0]), card).reserve / GB:.1f}"


def _table(cards: dict[int, Hardware]) -> Iterator[str]:
    needs = [f"need at {context:,}" for context in CONTEXTS]
    longest = [f"longest on {size} GB" for size in cards]
    yield _row(["model", "weights", *needs, *longest])
    yield _row(["---", "---", *["---:"] * (len(needs) + len(longest))])
    for name in MODELS:
        for bits, width in WIDTHS.items():
            cells = [_need(name, bits, context, cards) for context in CONTEXTS]
            cells += [_longest(name, bits, card) for card in cards.values()]
            yield _row([name, width, *cells])


def _narrower(card: Hardware) -> Iterator[str]:
    heads = [f"draft head at {bits}" for bits in (16, 8, 4)]
    steps = ["a step reads, lm_head at 16", "at 8"]
    yield _row(["model", *heads, *steps, "need", "need with both at 8"])
    yield _row(["---", *["---:"] * (len(heads) + len(steps) + 2)])
    for name in MODELS:
        config = KNOWN_MODELS[name].config
        context = min(CONTEXTS[1], config.max_position)
        plans = {
            bits: planned(name, 4, context, card, head_bits=bits, lm_head_bits=max(bits, 8))
            for bits in (16, 8, 4)
        }
        draft = KNOWN_MODELS[name].head
        cells = [NONE if draft is None else f"{head_bytes(draft, bits) / GB:.2f}" for bits in plans]
        cells += [f"{step_bytes(config, plans[bits].widths) / GB:.2f}" for bits in (16, 8)]
        cells += [f"{_own(plans[bits].memory) / GB:.1f}" for bits in (16, 8)]
        yield _row([name + (" *" if config.tie_word_embeddings else ""), *cells])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _need(name: str, bits: int, context: int, cards: dict[int, Hardware]) -> str:
    if context > KNOWN_MODELS[name].config.max_position:
        return NONE
    plans = {size: planned(name, bits, context, card).memory for size, card in cards.items()}
    fitting = [str(size) for size, plan in plans.items() if plan.fits]
    return f"{_own(next(iter(plans.values()))) / GB:.1f} · {' '.join(fitting) or 'none'}"


def _own(plan: MemoryPlan) -> int:
    """Bytes of the plan without the reserve, which depends on the card."""
    return plan.total - plan.line("reserve").nbytes


def _longest(name: str, bits: int, card: Hardware) -> str:
    tokens = planned(name, bits, None, card).memory.longest_context
    if tokens == 0:
        return "none"
    return f"**{tokens:,}**" if tokens == KNOWN_MODELS[name].config.max_position else f"{tokens:,}"


def _refusals(card: Hardware) -> Iterator[str]:
    for name in MODELS:
        context = min(CONTEXTS[1], KNOWN_MODELS[name].config.max_position)
        plan = planned(name, 8, context, card)
        if plan.memory.fits:
            continue
        options = alternatives(plan, _settings(name, 8, context), card)
        short = f" with {context:,}" if context < CONTEXTS[1] else ""
        fits = ", ".join(f"`{option}`" for option in options)
        yield (
            f"- {name}{short} needs {plan.memory.total / GB:.1f} of {format_gb(plan.memory.budget)}; what fits: {fits}"
        )
