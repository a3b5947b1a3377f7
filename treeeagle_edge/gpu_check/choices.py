"""What a run of the GPU check is asked for, checked before anything takes time."""

from __future__ import annotations

from treeeagle_edge.errors import CannotRunError, UsageError
from treeeagle_edge.gpu_check.run import CheckOptions

MINUTES = 7.5  # unless something else is asked for
_LEAST_MINUTES, _MOST_MINUTES = 0.5, 60.0
_SIZES = ("full", "test")  # "test": tiny shapes, which run on a CPU


def check_options(
    device: str | None = None,
    minutes: float = MINUTES,
    sections: str | None = None,
    size: str = "full",
) -> CheckOptions:
    """The options for what was asked. device: as `detection.detect` takes it, None for the card with most room;
    sections: names with commas between, None for all.

    Raises UsageError for what is out of range or unknown, CannotRunError where there is no card to check.
    """
    if not _LEAST_MINUTES <= minutes <= _MOST_MINUTES:
        raise UsageError(
            f"--minutes is {minutes:g}, which is out of range", f"use {_LEAST_MINUTES:g} to {_MOST_MINUTES:g}"
        )
    if size not in _SIZES:
        raise UsageError(f"--size {size!r} is not a size of the GPU check", f"use {' or '.join(_SIZES)}")
    wanted = tuple(name.strip() for name in sections.split(",")) if sections is not None else ()
    # a wrong name is told before a card is looked for
    CheckOptions(device="", size=size, minutes=minutes, sections=wanted).plans()
    found = _find_card(device) if size == "full" else _detected(device or "cpu")
    return CheckOptions(found, size, minutes, wanted)


def _find_card(device: str | None) -> str:
    """The card to check, "cuda:N": in full it is a card or nothing, and the reason is the person's answer."""
    try:
        found = _detected(device or "cuda")
    except CannotRunError as error:
        if error.hint is None or "--device cpu" not in error.hint:
            raise
        # the usual way out, the CPU, is none here
        raise CannotRunError(
            error.message, "this checks an NVIDIA card; treeeagle profile says what was found"
        ) from error
    if not found.startswith("cuda"):
        raise UsageError(f"--device {device} is no card, and this checks one", "use cuda or cuda:N")
    return found


def _detected(device: str) -> str:
    from treeeagle_edge.hardware.detection import detect

    return detect(device).device
