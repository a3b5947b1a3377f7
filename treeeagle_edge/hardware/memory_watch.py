"""Memory that was really used: the peak of this process, or of CUDA devices, since a chosen moment."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class MemoryWatch:
    """Peak memory between `reset` and `peak`, in bytes.

    On Linux the kernel keeps the high-water mark of resident memory (VmHWM), and writing 5 to clear_refs
    starts it anew (proc(5)), so no peak is missed and no thread samples while something is being timed. Where
    that is not to be had, resident memory is read at `note` and `peak`, and peaks in between may be missed.
    """

    def __init__(self, device: str = "cpu", *others: str) -> None:
        """`device` is "cpu" or a torch CUDA device, whose allocator is then asked instead of the kernel.

        others: cards that hold a part, too. Peaks of several are added, though they need not fall together.
        """
        self.devices = (device, *others)
        self._cuda = device.startswith("cuda")
        self._highest = 0
        self._kernel_mark = False
        self.reset()

    @property
    def source(self) -> str:
        """Where the figure comes from, in words."""
        if self._cuda:
            return "peak of the CUDA allocator"
        return "peak resident memory" if self._kernel_mark else "resident memory, read between answers"

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._cuda:
            import torch

            for device in self.devices:
                torch.cuda.reset_peak_memory_stats(device)
            return
        self._kernel_mark = _restart_high_water_mark()
        self._highest = self.current()

    def note(self) -> None:
        """Look at memory now; needed only where the kernel keeps no peak for us, and cheap everywhere."""
        if not self._cuda and not self._kernel_mark:
            self._highest = max(self._highest, self.current())

    def current(self) -> int:
        """Bytes in use now."""
        if self._cuda:
            import torch

            return sum(map(torch.cuda.memory_allocated, self.devices)) + self.graphs()
        return _resident()

    def graphs(self) -> int:
        """Bytes that CUDA graphs hold: their replays write there, though no tensor has it and no peak counts it."""
        if not self._cuda:
            return 0
        import torch

        pools = (part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0))
        return sum(part["total_size"] - part["allocated_size"] for part in pools)

    def peak(self) -> int:
        """The most bytes in use since `reset`."""
        if self._cuda:
            import torch

            return sum(map(torch.cuda.max_memory_allocated, self.devices)) + self.graphs()
        if self._kernel_mark:
            return _high_water_mark()
        self.note()
        return self._highest


def _restart_high_water_mark() -> bool:
    try:
        _CLEAR.write_text("5")
        return _high_water_mark() > 0
    except OSError:  # no such file outside Linux; not writable in some containers
        return False


def _high_water_mark() -> int:
    return _status("VmHWM:") or 0


def _resident() -> int:
    """Bytes of this process in memory: the kernel says it on Linux, psutil finds it out elsewhere."""
    said = _status("VmRSS:")
    if said is not None:
        return said
    import psutil

    return int(psutil.Process().memory_info().rss)


def _status(key: str) -> int | None:
    """The figure in bytes that Linux keeps of this process under `key`; None where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
