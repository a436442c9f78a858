"""Wait for other processes, however busy the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 900.0
"""The only deadline. It ends a test that hangs, and says nothing about speed."""


def wait_until(condition: Callable[[], bool], message: Callable[[], str], pause_s: float = 0.02) -> None:
    """Poll until the condition holds. On a timeout, `message` describes what was found instead."""
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, message()
        time.sleep(pause_s)
