"""Parse and format bytes, token counts, durations and counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GIB = 1 << 30
_TOKEN_UNITS = (("M", 1 << 20), ("K", 1 << 10))


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return a size in bytes: 0, 25769803776, "24GiB", "24 GB", "512MiB".

    Args:
        size: A number of bytes, or a number with a unit. K, KiB and so on are powers of 1024, KB and so on of 1000.
        name: What error messages call the size.

    >>> parse_bytes("1.5KiB"), parse_bytes("2 KB"), parse_bytes(7)
    (1536, 2000, 7)
    """
    units = {"": 1, "B": 1} | {
        f"{prefix}{suffix}": base ** (power + 1)
        for power, prefix in enumerate("KMGT")
        for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
    }
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    is_part = match is not None and "." in match[1] and not match[2]
    if isinstance(size, bool) or match is None or match[2] not in units or is_part:
        raise ValueError(f'{name} is {size!r}; it must be "auto", a whole number of bytes, or a size such as "24GiB"')
    return int(float(match[1]) * units[match[2]])


def parse_memory(
    size: int | str, name: str, *, smallest: int = 1024, meant: str | None = None, zero_ok: bool = True
) -> int:
    """Return an amount of memory in bytes, refusing a bare number that must have lost its unit, such as 24.

    Args:
        smallest: Bare numbers below this many bytes are refused.
        meant: The value to suggest instead; the number in GiB by default.
        zero_ok: Accept 0.
    """
    num_bytes, text = parse_bytes(size, name), str(size).strip()
    if text.isdigit() and num_bytes < smallest and (num_bytes or not zero_ok):
        raise ValueError(f'{name} is {text}, a number of bytes; did you mean "{meant or f"{text}GiB"}"?')
    return num_bytes


def parse_tokens(text: str, option: str = "") -> int:
    """Return a number of tokens: "4096", "32K" (= 32768), "1M" (= 1048576)."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{option} {text!r} is not a number of tokens; write 4096, 32K or 1M (K = 1024)".strip())
    return int(match[1]) * {"": 1, **dict(_TOKEN_UNITS)}[match[2]]


def parse_list(text: str, parse: Callable[[str], T]) -> list[T]:
    """Return the parsed items of a comma-separated list.

    >>> parse_list("32K, 1M", parse_tokens)
    [32768, 1048576]
    """
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("the list is empty; separate its items with commas, as in 32K,64K,1M")
    return [parse(part) for part in parts]


def gib(num_bytes: float) -> str:
    """Return a human-readable size: "3.42 GiB", or MiB below a tenth of one."""
    if abs(num_bytes) < 0.1 * GIB:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def exact_bytes(num_bytes: int) -> str:
    """Return a size to the byte: "601 bytes", "3,670,860,595 bytes (3.42 GiB)"."""
    return f"{num_bytes:,} bytes" if num_bytes < 1 << 20 else f"{num_bytes:,} bytes ({num_bytes / GIB:.2f} GiB)"


def duration(seconds_taken: float) -> str:
    """Return a human-readable duration, in milliseconds if it is short: "120 ms", "2 m 05 s"."""
    return f"{1000 * seconds_taken:.3g} ms" if seconds_taken < 0.9995 else seconds(seconds_taken)


def seconds(duration: float) -> str:
    """Return a human-readable duration: "0.1 s", "2 m 05 s", "3 h 07 m"."""
    if duration < 60:
        return f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"


def short_tokens(tokens: float) -> str:
    """Return a token count in at most four digits: 131072 is "128K"."""
    for unit, size in _TOKEN_UNITS:
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.0f}"


def tokens_text(tokens: int) -> str:
    """Return a token count as a command line takes it, exactly: "4M", or "4097"."""
    for unit, size in _TOKEN_UNITS:
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def exact_size(num_bytes: int) -> str:
    """Return a size as a command line takes it, exactly: "119GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def round_down_size(num_bytes: int) -> str | int:
    """Return the largest size of four digits that is no more than this: "114.3GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            scale = 10 ** max(0, 4 - len(str(num_bytes // size)))
            return f"{num_bytes * scale // size / scale:.10g}{unit}"
    return max(0, num_bytes)


def count(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural if needed: "1 step", "1,024 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
