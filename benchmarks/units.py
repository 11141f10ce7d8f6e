"""Numbers for people."""


def bytes_text(count: float) -> str:
    """Bytes with a unit."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.4g} B"


def time_text(seconds: float) -> str:
    """Seconds with a unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
