"""What Ctrl-C and SIGTERM mean during a run: stop between two chunks and save, or end at once when asked again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class StopRequested(Exception):
    """Raised between two chunks after a signal, where weights and optimizer are whole."""


class Interrupts:
    """Takes the two signals while its `with` lasts. At first Ctrl-C ends the program, as ever."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.stop_requested = False
        self.terminated = False
        """SIGTERM has come: the run ends, whatever was to be skipped."""
        self._notice: str | None = None
        self._saving: str | None = None
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        return EXIT_TERMINATED if self.terminated else EXIT_INTERRUPTED

    def check(self) -> None:
        """Called between two chunks."""
        if self.stop_requested:
            raise StopRequested

    def stop(self, notice: str) -> None:
        """From here on the first signal says `notice` and stops at the next chunk; Ctrl-C again ends the program."""
        self._notice, self._saving = notice, None
        self.stop_requested = self.terminated

    def protect(self, notice: str) -> None:
        """From here on the first Ctrl-C says `notice` and does nothing, the next one ends the program."""
        self._saving = notice

    def _on_signal(self, signum: int, frame: Any) -> None:
        if signum == signal.SIGTERM:
            self._on_terminate()
        elif self._saving is not None:
            if not self._saving:
                raise KeyboardInterrupt
            notice, self._saving = self._saving, ""
            self._say(notice)
        elif self._notice is None or self.stop_requested:
            raise KeyboardInterrupt
        else:
            self.stop_requested = True
            self._say(self._notice)

    def _on_terminate(self) -> None:
        # Those who send it may send it again while we save; they have SIGKILL when they mean it.
        if not self.terminated:
            self.terminated = self.stop_requested = True
            if self._saving is None:
                self._say("SIGTERM: stopping at the next chunk")

    def _say(self, line: str) -> None:
        """The signal may have come in the very middle of printing another line."""
        try:
            self.say(line)
        except RuntimeError:
            os.write(2, f"{line}\n".encode())

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
