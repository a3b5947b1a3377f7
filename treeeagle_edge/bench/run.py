"""A whole bench: loads the model, warms up, measures both arms, and puts the result into one document."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import TYPE_CHECKING, Any

from treeeagle_edge.bench.arms import Bench, size_quick
from treeeagle_edge.bench.document import Document, build_document
from treeeagle_edge.bench.memory import MemoryUse, memory_document
from treeeagle_edge.bench.prompts import BenchPrompt
from treeeagle_edge.bench.samples import BenchRun, Limits
from treeeagle_edge.hardware.memory_watch import MemoryWatch
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings

if TYPE_CHECKING:
    from treeeagle_edge.runtime import Runtime

FULL_TOKENS, FULL_REPETITIONS = 256, 3
QUICK_SECONDS = 60.0  # for the whole of a quick bench, loading included
QUICK_LEAST_SECONDS = 15.0  # for measuring, however long loading took


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, as the person asked for it."""

    settings: RunSettings
    params: SamplingParams  # without stop ids, which come from the model; max_tokens None: `quick` decides
    prompts: tuple[BenchPrompt, ...]
    prompts_name: str = "built-in"
    turns: str = "first"  # or "all"
    quick: bool = False
    repetitions: int | None = None  # None: `quick` decides
    system: str | None = None
    raw: bool = False
    stops: tuple[str, ...] = ()


def run_bench(
    options: BenchOptions,
    *,
    progress: Progress = silent,
    show_prompt: Callable[[str], None] | None = None,
) -> tuple[Document, BenchRun]:
    """Load the model and measure. Returns the document of `-o json`, and the run that it was made from.

    show_prompt: gets every rendered prompt (its first turn) before the first one runs. Raises the loader's errors, and
    InputError for a prompt that does not fit the context.
    """
    started = perf_counter()
    import torch  # noqa: F401  # before the first look at memory: it is the program, not the model

    from treeeagle_edge.runtime import load_runtime

    host = MemoryWatch()
    program = host.current()
    runtime = load_runtime(options.settings, progress=progress)
    loading_peak = host.peak()
    watch = MemoryWatch(runtime.device, *runtime.other_devices)
    on_host = runtime.device == "cpu"
    loaded = watch.current()
    bench = Bench(
        runtime.engine,
        runtime.tokenizer,
        options.prompts,
        replace(options.params, stop_ids=runtime.generation.stop_ids | runtime.tokenizer.stop_ids),
        speculate=options.settings.speculate,
        system=options.system,
        raw=options.raw,
        stops=options.stops,
        watch=watch,
        progress=progress,
        clock=perf_counter,
    )
    if show_prompt is not None:
        for prompt in options.prompts:
            show_prompt(bench.prompt(prompt).text)
    limits = _limits(bench, options, started)
    run = bench.run(limits)
    use = MemoryUse(
        held=_held(runtime) | {"CUDA graphs": watch.graphs()},
        program=program if on_host else 0,
        loading_peak=loading_peak if on_host else loaded,
        loaded=loaded,
        answering_peak=max(sample.peak_bytes for sample in run.samples),
        source=watch.source,
    )
    document = build_document(
        run,
        environment=environment_of(runtime),
        settings=_settings(options, runtime, run),
        memory=memory_document(runtime.plan, use),
        notes=runtime.notes,
    )
    return document, run


def _limits(bench: Bench, options: BenchOptions, started: float) -> Limits:
    """Check that every prompt fits, warm up, and decide how much is measured."""
    lengths = [len(bench.case(prompt).ids) for prompt in options.prompts]
    pace = bench.warm_up()
    if options.quick:
        seconds = max(QUICK_SECONDS - (perf_counter() - started), QUICK_LEAST_SECONDS)
        limits = size_quick(pace, sum(lengths), sum(len(prompt.turns) for prompt in options.prompts), seconds)
    else:
        limits = Limits(FULL_TOKENS, FULL_REPETITIONS)
    if options.repetitions is not None:
        limits = replace(limits, repetitions=options.repetitions, seconds=None)
    if options.params.max_tokens is not None:
        limits = replace(limits, max_tokens=options.params.max_tokens)
    return limits


def _held(runtime: Runtime) -> dict[str, int]:
    """Bytes of the loaded tensors, under the names that the plan's lines have."""
    engine = runtime.engine
    held = {"weights": engine.target.nbytes, "KV": engine.kv_nbytes}
    return held | ({"head": engine.head.nbytes} if engine.head is not None else {})


def environment_of(runtime: Runtime) -> dict[str, Any]:
    """Versions, device and time of a measurement, without the name of the machine."""
    return {
        "treeeagle": _version("treeeagle-edge"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "bitsandbytes": _version("bitsandbytes"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "device": runtime.device_label,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _settings(options: BenchOptions, runtime: Runtime, run: BenchRun) -> dict[str, Any]:
    sampling = {
        name: getattr(options.params, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        )
    }
    return {
        "model": runtime.model_name,
        "head": runtime.head_name,
        "bits": runtime.bits,
        "head_bits": runtime.plan.widths.head if runtime.head_name else None,
        "lm_head_bits": runtime.plan.widths.lm_head,
        "profile": options.settings.profile,
        "context": runtime.context,
        "tree": asdict(runtime.tree) if runtime.tree is not None else None,
        "threads": _threads(),
        "kernels": runtime.kernels,
        "exact": options.settings.exact,
        "arms": list(run.arms),
        "quick": options.quick,
        "max_tokens": run.limits.max_tokens,
        "repetitions": run.repetitions,
        "prompts": options.prompts_name,
        "turns": options.turns,
        "system": options.system,
        "raw": options.raw,
        "stop": list(options.stops),
        "sampling": sampling,
    }


def _threads() -> int | None:
    torch = sys.modules.get("torch")  # not imported for this alone, which would take seconds
    return torch.get_num_threads() if torch is not None else None
