"""Numbers, and lists of names, as people read them."""

from collections.abc import Sequence


def count(number: float) -> str:
    """Returns `8.03 B`, `124 M`, `512`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            value = number / (1e3 if unit == "k" else size)
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Returns `1 rank`, `1,758 documents`, `2 batches`, `3 classes`, `2 recoveries`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number:,} {noun.removesuffix('y')}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Returns up to `most` of the names: `a, b, c and 60 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def size(num_bytes: float) -> str:
    """Returns `79.1 GiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.{1 if num_bytes < 100 * 1024**power else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def flops(number: float) -> str:
    """Returns `48.2 GFLOP`."""
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number:.0f} FLOP"


def span(seconds: float) -> str:
    """Returns `3.2 days`, `4.5 h`, `12 min`, `3.1 s`, `120 ms`."""
    for factor, unit in ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= (2 * factor if factor > 1 else 1):
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def clock_time(seconds: float) -> str:
    """Returns `1:02:03`, `2:03` below an hour, or `4d 1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours and not days:
        return f"{minute}:{second:02}"
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def percent(share: float) -> str:
    """Returns `41.2%`; what is below a tenth of a per cent says so."""
    return f"{100 * share:.1f}%" if share >= 0.001 or not share else "< 0.1%"
