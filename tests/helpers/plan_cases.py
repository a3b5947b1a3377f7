"""Machines to plan for, and the plan of a run on one."""

from __future__ import annotations

from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.planning.known_models import KNOWN_MODELS
from treeeagle_edge.planning.model_shapes import planned_model
from treeeagle_edge.planning.run_plan import pick_profile, plan_run
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB
from treeeagle_edge.widths import Widths, choose_widths

LLAMA = KNOWN_MODELS["meta-llama/Llama-3.1-8B-Instruct"]


def machine(*, card: float | None = None, ram: float = 24) -> Hardware:
    """A computer with `ram` GB free and, where asked for, a card with `card` GB free."""
    gpus = () if card is None else (Gpu(0, "a card", int(card * GB), int(card * GB), usable=True),)
    cpu = Cpu("a processor", 2, 2, ("avx2",))
    return Hardware(
        "cuda:0" if gpus else "cpu", "for a test", cpu, Ram(int(ram * GB), int(ram * GB), False), gpus
    )


def usual(bits: int, device: str) -> Widths:
    return choose_widths(bits, device, native=False)


def made_run(run: RunSettings, here: Hardware):
    profile = pick_profile(run, here)
    return plan_run(run, profile, here, planned_model(run, profile))
