"""Sections of the GPU check: memory of random weights, and that many rounds take no more memory than a few."""

from __future__ import annotations

import gc
import time
from functools import partial

import torch

from treeeagle_edge.gpu_check.answers import answer, engine_of, prompt_of, script_of
from treeeagle_edge.gpu_check.models import LED, ScriptedHead
from treeeagle_edge.gpu_check.probe import Finding, Probe
from treeeagle_edge.gpu_check.process import NOT_HERE, OK
from treeeagle_edge.kernels.dispatch import use_backend

_RIGHT = 1  # levels that the scripted head drafts right, so that a round gives two tokens


def check_load(probe: Probe, finding: Finding) -> None:
    """Draw and quantise the main model layer by layer; note seconds, bytes held at the end, and their peak."""
    probe.release()
    before = allocator(probe.device)
    if before is not None:
        torch.cuda.reset_peak_memory_stats(probe.device)
    started = time.perf_counter()
    model = probe.model(probe.sizes.main)
    after = allocator(probe.device)
    row = {"model": probe.sizes.main.name, "bits": probe.sizes.bits, "seconds": time.perf_counter() - started}
    row |= {"weights": model.weights.nbytes, "allocated": None, "peak": None}
    if before is not None and after is not None:
        row["allocated"] = after["allocated"] - before["allocated"]
        row["peak"] = torch.cuda.max_memory_allocated(probe.device) - before["allocated"]
    finding.rows.append({**row, "result": OK})


def check_memory(probe: Probe, finding: Finding) -> None:
    """For each attention, compare what the allocator holds after the first answer and after the last."""
    columns = (
        *("rounds", "allocated before", "allocated after", "reserved before", "reserved after"),
        "new blocks",
    )
    each = probe.left / len(probe.backends())
    for attention in probe.backends():
        row = {"attention": attention, **dict.fromkeys(columns)}
        stop = time.perf_counter() + each
        probe.attempt(
            finding,
            row,
            partial(_watch, probe, finding, attention, stop),
        )


def _watch(probe: Probe, finding: Finding, attention: str, stop: float) -> dict[str, object]:
    """Answer again and again. All answers are equally long, so the memory of the first must be enough for all."""
    sizes = probe.sizes
    target = probe.model(sizes.main).target(LED, sizes.context)
    prompt = prompt_of(target, sizes.prompt)
    tokens = sizes.context - sizes.prompt
    text = script_of(prompt, target, sizes.context + sizes.tree_rows)
    with use_backend(attention):
        engine = engine_of(target, ScriptedHead(probe.head(), text, _RIGHT), sizes)
        answer(engine, prompt, tokens, speculate=True)
        used, before, rounds = engine.usage().used_slots, allocator(probe.device), 0
        while rounds < sizes.rounds and time.perf_counter() < stop:
            rounds += len(answer(engine, prompt, tokens, speculate=True)[1]) - 1  # without the prefill
        after = allocator(probe.device)
    found: dict[str, object] = {"rounds": rounds}
    if engine.usage().used_slots != used:
        return {
            **found,
            "result": finding.fail(f"{engine.usage().used_slots - used} slots were not given back"),
        }
    if before is None or after is None:
        return {**found, "result": f"{NOT_HERE}: only CUDA's allocator counts; slots were all given back"}
    found |= {
        "allocated before": before["allocated"],
        "allocated after": after["allocated"],
        "reserved before": before["reserved"],
        "reserved after": after["reserved"],
        "new blocks": after["blocks"] - before["blocks"],
    }
    grown = [name for name in before if after[name] > before[name]]
    if grown:
        return {**found, "result": finding.fail(f"memory grew over {rounds:,} rounds: {', '.join(grown)}")}
    return found


def allocator(device: torch.device) -> dict[str, int] | None:
    """Bytes in use, bytes held, and how many blocks the driver has given so far; None without CUDA."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "blocks": int(torch.cuda.memory_stats(device).get("num_device_alloc", 0)),
    }
