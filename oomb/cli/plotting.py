"""Check that a picture can be written: the extension of its name, and that matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

EXTENSIONS = (".png", ".svg", ".pdf")


def check_picture(path: str | Path, option: str) -> None:
    """Raise ValueError if no picture can be written to `path`, the value of a command-line option."""
    if Path(path).suffix.lower() not in EXTENSIONS:
        raise ValueError(f"{option} {str(path)!r} is not a picture; its name must end in {', '.join(EXTENSIONS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib") from None
