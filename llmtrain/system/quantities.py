"""Numbers, counts, sizes and durations as people read them."""

from __future__ import annotations

MAX_DURATION_S = 1e11
"""Longest time that is shown in units, and added to a date."""


def four_digits(value: float | None) -> str:
    """Formats a number with four significant digits; in a record, None is a number that was not finite."""
    if value is None:
        return "not finite"
    return f"{value:.4f}" if 0.1 <= abs(value) < 10 else f"{value:.4g}"


def compact(value: float) -> str:
    """Formats a count with three or four digits: 950, 12.3k, 4.56M."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            scaled = value / unit
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{name}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Formats a duration with two units: 42s, 2m11s, 1h05m, 3d04h."""
    if not abs(seconds) < MAX_DURATION_S:
        return f"{seconds / 86400:.3g}d"
    whole = round(seconds)
    for unit, below, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= unit:
            return f"{whole // unit}{names[0]}{whole % unit // below:02d}{names[1]}"
    return f"{whole}s"


def readable_bytes(size: int) -> str:
    """Formats bytes in the largest unit in which they are at least 1."""
    number = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{number:,.1f} {unit}"
