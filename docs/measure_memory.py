"""Compares resident memory with the plan, for each width of weights in a process of its own.

python docs/measure_memory.py [--bits 8 --bits 4] [--fill 8000] [--tokens 128] [--threads 2] [-o memory.json]

A process loads the model with its head, reads a prompt of `--fill` tokens, so that most pages of the KV pool are
written, and answers. The peak of its resident memory is compared with a limit: 1.25 x the plan's weights, head and
pool, plus the memory of another process that imports the same modules and loads nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FACTOR = 1.25  # of weights + head + pool
HELD = ("weights", "embedding", "head", "KV")


def answer_once(chosen: argparse.Namespace) -> dict[str, Any]:
    """Load and answer. Returns planned and used bytes, and the names of the imported modules."""
    from measuring.runs import load, long_prompt
    from measuring.timing import decode

    from treeeagle_edge.bench.prompts import builtin_prompts
    from treeeagle_edge.hardware.memory_watch import MemoryWatch
    from treeeagle_edge.sampling_params import SamplingParams

    watch = MemoryWatch()
    runtime = load(chosen, chosen.bits[0], context=chosen.context)
    loading, loaded = watch.peak(), watch.current()
    watch.reset()
    prompt = long_prompt(runtime, builtin_prompts(), chosen.fill)
    decode(runtime.engine, prompt, SamplingParams(max_tokens=chosen.tokens))
    return {
        "bits": chosen.bits[0],
        "plan": {line.name: line.nbytes for line in runtime.plan.lines},
        "held": sum(line.nbytes for line in runtime.plan.lines if line.name.startswith(HELD)),
        "loading": loading,
        "loaded": loaded,
        "answering": watch.peak(),
        "source": watch.source,
        "modules": sorted(name for name, module in sys.modules.items() if getattr(module, "__spec__", None)),
    }


def import_only() -> int:
    """Bytes resident in this process once it has imported the modules named on stdin, one a line."""
    import psutil

    for name in sys.stdin.read().split():
        try:
            importlib.import_module(name)
        except Exception:  # some modules can only be imported in the process that made them
            continue
    return int(psutil.Process().memory_info().rss)


def child(arguments: list[str], stdin: str = "") -> Any:
    """What a new process with these arguments prints, read as JSON."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measure(chosen: argparse.Namespace, bits: int) -> dict[str, Any]:
    """One width, in two fresh processes."""
    shared = [f"--{key}={getattr(chosen, key)}" for key in ("model", "context", "fill", "tokens", "threads")]
    found = child(["--as", "answer", f"--bits={bits}", *shared])
    modules = found.pop("modules")
    found["imports"] = child(["--as", "imports"], "\n".join(modules))
    found["bar"] = int(FACTOR * found["held"]) + found["imports"]
    found["share"] = found["answering"] / found["bar"]
    return found


def table(results: list[dict[str, Any]]) -> str:
    """One row for each width."""
    from treeeagle_edge.markdown_table import aligned_table

    header = ("bits", "weights + head + pool", "imports", f"bar: {FACTOR} x + imports", "most while answering",
              "most while loading")  # fmt: skip
    columns = ("held", "imports", "bar", "answering", "loading")
    rows = [(str(item["bits"]), *(f"{item[key] / 1e6:,.0f} MB" for key in columns)) for item in results]
    return aligned_table(header, rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2-135m", help="name, directory or .gguf file")
    made.add_argument("--bits", type=int, action="append", help="8 and 4 unless given; may be repeated")
    made.add_argument("--context", type=int, default=8192, help="tokens")
    made.add_argument("--fill", type=int, default=8000, help="tokens of the prompt")
    made.add_argument("--tokens", type=int, default=128, help="of the answer")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    made.add_argument("--as", dest="role", choices=("answer", "imports"), help=argparse.SUPPRESS)
    return made.parse_args()


def main() -> int:
    """Measure and print; exit code 1 where a width needs more than the limit."""
    chosen = arguments()
    if chosen.role == "imports":
        print(import_only())
        return 0
    if chosen.role == "answer":
        print(json.dumps(answer_once(chosen)))
        return 0
    results = [measure(chosen, bits) for bits in chosen.bits or (8, 4)]
    print(table(results))
    print(f"\nprompt {chosen.fill:,} tokens, context {chosen.context:,}; {results[0]['source']}")
    for item in results:
        word = "within" if item["share"] <= 1 else "ABOVE"
        print(f"- {item['bits']}-bit: {item['share']:.2f} of the bar, {word} it")
    if chosen.output:
        chosen.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(item["share"] <= 1 for item in results) else 1


if __name__ == "__main__":
    sys.exit(main())
