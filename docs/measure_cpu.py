"""Measures what the documentation claims about the CPU: passes by rows, decoding, prefill, second turns, memory.

python docs/measure_cpu.py [--parts verify,decode,prefill,turn,memory] [--threads 2] [-o cpu.json]

| part    | what it measures                                                                                |
|---------|-------------------------------------------------------------------------------------------------|
| verify  | a verify pass by its number of rows, 8 and 4 bits, as a multiple of one row                     |
| decode  | plain and tree decoding at 8 and 4 bits, and llama.cpp at both, prompt by prompt                |
| prefill | a prompt of 1,000 tokens, ours and llama.cpp's                                                  |
| turn    | the time to first token of a chat's second turn                                                 |
| memory  | resident memory against the plan (docs/measure_memory.py, in processes of its own)              |

Inside a part all arms run in turn, in an order that changes with every prompt; results are medians of ratios of
neighbours. decode and prefill need llama-cpp-python (pip install llama-cpp-python). It gets the same GGUF file for 4
bits and, for 8 bits, one that its own quantiser writes from the same values; only its passes are timed, not its
sampling loop. Model files in other formats have no such arm: give a .gguf.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import llama, speed
from measuring.runs import (
    Report,
    add_bits,
    add_prompts,
    as_ids,
    forget_costs,
    load_each,
    parser,
    questions,
    run,
    say,
)

from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.sources.model_names import resolve_model

PARTS = ("verify", "decode", "prefill", "turn", "memory")
WITH_LLAMA = {"decode", "prefill"}


def numbers(text: str) -> list[int]:
    """ "1,2,4" as a list; 1 row is always among them, since the others are compared with it."""
    return sorted({1, *(int(item) for item in text.split(","))})


def parts(text: str) -> list[str]:
    """The names of PARTS in `text`, separated by commas. Raises UsageError for another name."""
    wanted = [item.strip() for item in text.split(",")]
    unknown = [item for item in wanted if item not in PARTS]
    if unknown:
        raise UsageError(f"there is no part named {unknown[0]}", f"use some of {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted]


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    made.add_argument("--parts", default=",".join(PARTS), help="some of them, separated by commas")
    add_bits(made)
    made.add_argument("--tokens", type=int, default=64, help="of an answer")
    made.add_argument("--repetitions", type=int, default=3, help="of every prompt in decode")
    made.add_argument(
        "--rows", type=numbers, default=[1, 2, 4, 8, 12, 16, 24, 32], help="of verify passes, with commas"
    )
    made.add_argument("--prefix", type=int, default=200, help="tokens before a verify pass")
    made.add_argument("--pass-repetitions", type=int, default=30, help="turns of verify")
    made.add_argument("--prefill", type=int, default=1000, help="tokens of the long prompt")
    made.add_argument("--prefill-repetitions", type=int, default=9, help="turns of prefill")
    made.add_argument("--chats", type=int, default=10, help="of two turns")
    made.add_argument(
        "--first-answer", type=int, default=128, help="tokens of a chat's first answer, at most"
    )
    made.add_argument(
        "--flash-attention", action="store_true", help="of llama.cpp, which has it off by default"
    )
    return made.parse_args()


def memory_part(chosen: argparse.Namespace) -> None:
    """Run docs/measure_memory.py, whose table goes to stdout."""
    print("### Resident memory\n", flush=True)
    script = Path(__file__).with_name("measure_memory.py")
    bits = [f"--bits={item}" for item in chosen.bits]
    subprocess.run(
        [sys.executable, str(script), f"--threads={chosen.threads}", f"--model={chosen.model}", *bits]
    )
    print(flush=True)


def main() -> int:
    """Measure the chosen parts and print them; exit code 1 where tree and plain differ."""
    chosen = arguments()
    wanted = parts(chosen.parts)
    chosen.bits = chosen.bits or [8, 4]
    path = resolve_model(chosen.model)
    if WITH_LLAMA & set(wanted):
        llama.library()  # raises where it is missing, before anything is loaded
        if path.suffix != ".gguf":
            raise InputError(f"{path} is no GGUF file, so llama.cpp cannot read it", "give a .gguf file")
    report = Report("cpu", chosen)
    if "memory" in wanted:
        memory_part(chosen)
    if wanted == ["memory"]:
        return 0
    forget_costs()
    text = questions(chosen)
    context = max(1024, chosen.prefill + chosen.tokens + 64)
    runtimes = load_each(chosen, report, context=context)
    first = runtimes[chosen.bits[0]]
    if "verify" in wanted:
        speed.verify_part(report, runtimes, chosen, text)
    if "turn" in wanted:
        speed.second_turn_part(report, runtimes, chosen, text)
    if WITH_LLAMA & set(wanted):
        with tempfile.TemporaryDirectory() as folder:
            files = {4: path}
            if 8 in chosen.bits:
                say("writing the GGUF file for llama.cpp at 8 bits")
                files[8] = llama.write_eight_bit(path, Path(folder), chosen.threads)
            arms = {
                bits: llama.LlamaArm(
                    files[bits],
                    threads=chosen.threads,
                    context=context,
                    flash_attention=chosen.flash_attention,
                )
                for bits in chosen.bits
            }
            print(f"llama.cpp 4 is {path.name}; llama.cpp 8 is {llama.MAKING}; llama-cpp-python "
                  f"{llama.library().__version__}\n", flush=True)  # fmt: skip
            prompts = as_ids(first, text)
            if "decode" in wanted:
                speed.decode_part(report, runtimes, arms, chosen, prompts)
            if "prefill" in wanted:
                speed.prefill_part(report, runtimes, arms, chosen, text)
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
