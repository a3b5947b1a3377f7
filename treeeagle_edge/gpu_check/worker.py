"""The worker process of the GPU check: runs sections on the device and writes events, each a line of JSON."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from types import MappingProxyType
from typing import IO, Any

import torch

from treeeagle_edge import __version__
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.attention import check_attention
from treeeagle_edge.gpu_check.kernels import check_kernels
from treeeagle_edge.gpu_check.linears import check_bandwidth, check_linears, check_second_linears
from treeeagle_edge.gpu_check.memory import check_load, check_memory
from treeeagle_edge.gpu_check.parity import check_parity
from treeeagle_edge.gpu_check.passes import check_graphs, check_passes, check_second_passes
from treeeagle_edge.gpu_check.probe import ContextLostError, Finding, Probe
from treeeagle_edge.gpu_check.process import FAILED, LOST, NOT_HERE, OK, Order
from treeeagle_edge.gpu_check.products import check_products, check_second_products
from treeeagle_edge.gpu_check.rounds import check_rounds
from treeeagle_edge.gpu_check.served import check_served
from treeeagle_edge.gpu_check.sizes import SIZES
from treeeagle_edge.gpu_check.speed import check_speed
from treeeagle_edge.gpu_check.timing import said
from treeeagle_edge.hardware.detection import detect
from treeeagle_edge.kernels.current_card import use_card

SECTIONS: Mapping[str, Callable[[Probe, Finding], None]] = MappingProxyType(
    {
        "bandwidth": check_bandwidth,
        "kernels": check_kernels,
        "load": check_load,
        "served": check_served,
        "parity": check_parity,
        "passes": check_passes,
        "linears": check_linears,
        "attention": check_attention,
        "speed": check_speed,
        "graphs": check_graphs,
        "rounds": check_rounds,
        "linears-2": check_second_linears,
        "memory": check_memory,
        "products": check_products,
        "passes-2": check_second_passes,
        "products-2": check_second_products,
    }
)
_LEAST_SECONDS = 5.0  # no section begins where less time is left
_DISTRIBUTIONS = ("torch", "triton", "bitsandbytes", "transformers")


def main(text: str) -> int:
    """Run the sections of the order `text`. Returns the exit code: 0, or `LOST` where the device no longer works."""
    order = Order.read(text)
    channel = _private_stdout()
    device = torch.device(order.device)
    if device.type == "cuda":
        use_card(device)
    environment = describe(device)
    _send(channel, {"event": "environment", "environment": environment, "card": label(environment)})
    probe = Probe(
        device,
        SIZES[order.size],
        triton=order.triton,
        facts=order.facts,
        report=lambda rows: _send(channel, {"event": "rows", "rows": rows}),
    )
    for name, seconds in order.sections:
        left = order.stop - time.time()
        if left < _LEAST_SECONDS:
            break
        _send(channel, {"event": "start", "name": name})
        probe.stop = time.perf_counter() + min(seconds, left)
        section, lost = run_section(SECTIONS[name], probe)
        _send(channel, {"event": "end", "section": section, "facts": probe.facts})
        if lost:
            os._exit(LOST)  # without destructors, which may never return on a broken device
    return 0


def run_section(section: Callable[[Probe, Finding], None], probe: Probe) -> tuple[dict[str, Any], bool]:
    """Run one section. Returns its part of the document, and whether the device no longer works.

    What the section raises becomes a part of its result.
    """
    finding, started, lost = Finding(), time.perf_counter(), False
    status, reason = OK, None
    try:
        with torch.inference_mode():
            section(probe, finding)
    except CannotRunError as error:
        status, reason = NOT_HERE, error.message
    except ContextLostError as error:
        status, reason, lost = FAILED, f"the device answers no more: {error}", True
    except Exception as error:
        finding.problems.append(traceback.format_exc())
        status, reason = FAILED, said(error)
    if not lost:
        try:
            probe.require_device()
        except ContextLostError as error:
            status, reason, lost = FAILED, f"the device answers no more: {error}", True
    if status == OK and finding.problems:
        status, reason = FAILED, finding.problems[0].strip().splitlines()[-1]
    elif status == OK and finding.rows and all(row["result"].startswith(NOT_HERE) for row in finding.rows):
        status, reason = NOT_HERE, finding.rows[0]["result"].partition(": ")[2]
    seconds = time.perf_counter() - started
    found = {"rows": finding.rows, "notes": [*dict.fromkeys(finding.notes)], "problems": finding.problems}
    return {"status": status, "reason": reason, "seconds": seconds, **found}, lost


def describe(device: torch.device) -> dict[str, Any]:
    """The card, or the processor where there is none, and the versions of the software."""
    hardware = detect(str(device))
    versions: dict[str, str | None] = {"treeeagle-edge": __version__, "python": sys.version.split()[0]}
    versions |= {name: _version(name) for name in _DISTRIBUTIONS} | {"CUDA": torch.version.cuda}
    found: dict[str, Any] = {"device": str(device), "card": hardware.cpu.name, "architecture": "cpu"}
    found |= dict.fromkeys(("driver", "memory_bytes", "multiprocessors", "l2_bytes"))
    if hardware.gpu is not None:
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "architecture": f"sm_{properties.major}{properties.minor}",
            "driver": hardware.gpu.driver,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    return {**found, "versions": versions}


def label(environment: Mapping[str, Any]) -> str:
    """The name of the device, which stands beside all figures."""
    return f"{environment['card']} ({environment['architecture']})"


def _version(name: str) -> str | None:
    """Version of a package; None where it is not installed. A package that was only copied has no known version."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        found = importlib.util.find_spec(name)
        return None if found is None else "of unknown version"


def _private_stdout() -> IO[str]:
    """The pipe to the parent process. From now on, stdout of all libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _send(channel: IO[str], event: Mapping[str, Any]) -> None:
    channel.write(json.dumps(_finite(event), allow_nan=False) + "\n")
    channel.flush()


def _finite(value: Any) -> Any:
    """`value` with words for infinity and NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
