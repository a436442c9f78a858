"""Parse and format bytes, token counts, durations and counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes from a number or a text: 0, 25769803776, "24GiB", "24 GB", "512MiB"."""
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


T = TypeVar("T")


def parse_tokens(text: str, option: str = "") -> int:
    """A number of tokens: "4096", "32K" (= 32768), "1M" (= 1048576)."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{option} {text!r} is not a number of tokens; write 4096, 32K or 1M (K = 1024)".strip())
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]


def parse_list(text: str, parse: Callable[[str], T]) -> list[T]:
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("the list is empty; separate its items by commas, as in 32K,64K,1M")
    return [parse(part) for part in parts]


GIB = 1 << 30


def gib(num_bytes: float) -> str:
    """Bytes for a person: "3.42 GiB", or MiB below a tenth of one."""
    if abs(num_bytes) < 0.1 * GIB:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def duration(seconds_taken: float) -> str:
    """Seconds for a person, of short ones milliseconds."""
    return f"{1000 * seconds_taken:.3g} ms" if seconds_taken < 0.9995 else seconds(seconds_taken)


def seconds(duration: float) -> str:
    """Seconds for a person: "2 m 05 s"."""
    if duration < 60:
        return f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"


def short_tokens(tokens: float) -> str:
    """131072 -> "128K"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.0f}"


def tokens_text(tokens: int) -> str:
    """As a person writes it, if it can be so exactly: 4M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def exact_size(num_bytes: int) -> str:
    """The same for bytes: 119GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def round_down_size(num_bytes: int) -> str | int:
    """The next size in four digits that is no more than this: 114.3GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            scale = 10 ** max(0, 4 - len(str(num_bytes // size)))
            return f"{num_bytes * scale // size / scale:.10g}{unit}"
    return max(0, num_bytes)


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
