"""Numbers in words: of bytes, and of things."""

from __future__ import annotations

GB = 10**9


def format_gb(nbytes: float) -> str:
    """Bytes as "8.3 GB" (10^9 bytes), with two digits after the point below 1 GB."""
    value = nbytes / GB
    return f"{value:.2f} GB" if abs(value) < 0.995 else f"{value:.1f} GB"


def format_size(nbytes: float) -> str:
    """Bytes of a file as "640 B", "812 kB", "93 MB" or "16.4 GB" (powers of 1,000)."""
    for unit, size in (("GB", GB), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def counted(count: int, thing: str) -> str:
    """ "1 token", "1,200 tokens"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
