"""Waits for other processes, however long a busy machine keeps them waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 900.0
"""The one deadline there is: it ends a test that hangs, and says nothing about speed."""


def wait_until(condition: Callable[[], bool], message: Callable[[], str], pause_s: float = 0.02) -> None:
    """Poll for a state. `message` says what was there instead."""
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, message()
        time.sleep(pause_s)
