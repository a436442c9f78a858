"""Handle Ctrl-C, SIGTERM and a lost terminal: stop between two chunks and save; a second Ctrl-C exits at once."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from oomb.cli.errors import EXIT_INTERRUPTED
from oomb.cli.train.state import RunState
from oomb.distributed import watch

SIGHUP = getattr(signal, "SIGHUP", None)
"""The terminal or the connection is gone. Only Unix has this signal."""


REPEAT_S = 2.0
"""Under torchrun, a second Ctrl-C within this time is the first one again."""


class StopRequested(BaseException):
    """Raised between two chunks after a signal. Like KeyboardInterrupt it is not an `Exception`, so that handlers of
    errors let it pass."""


class SignalHandler:
    """Context manager that handles signals by setting flags in the run's state.

    Until `stop` is called, Ctrl-C ends the program as usual. SIGHUP stays ignored if it was (nohup). Inside the `with`,
    printing raises no error, even if the terminal is gone.

    Args:
        print_line: Prints what a signal does.
        state: State of the run; a new one by default.
    """

    def __init__(self, print_line: Callable[[str], None], state: RunState | None = None) -> None:
        self.print_line, self.state = print_line, RunState() if state is None else state
        self.exit_code = EXIT_INTERRUPTED
        """Exit code of a run that a signal stopped."""
        self._last_ctrl_c = float("-inf")
        self._notice: str | None = None
        self._saving: str | None = None
        self._previous: dict[int, Any] = {}
        self._streams: dict[str, tuple[Any, SafeStream]] = {}

    def check(self) -> None:
        """Raise `StopRequested` if a signal asked to stop. Call it between two chunks."""
        if self.state.stop_requested:
            if (others := watch.current()) is not None:
                others.request_stop()
            raise StopRequested

    def stop(self, notice: str) -> None:
        """From here on, a signal prints `notice` and stops at the next chunk; Ctrl-C again exits."""
        self._notice, self._saving = notice, None
        self.state.stop_requested = self.state.terminated

    def protect(self, notice: str) -> None:
        """From here on, the first Ctrl-C only prints `notice`; the next one ends the program."""
        self._saving = notice

    def release(self) -> None:
        """From here on, Ctrl-C ends the program as usual."""
        self._notice = self._saving = None

    def _on_signal(self, signum: int, frame: Any) -> None:
        if signum != signal.SIGINT:
            self._on_terminate(signum)
        elif self._is_repeated():
            pass
        elif self._saving is not None:
            if not self._saving:
                raise KeyboardInterrupt
            notice, self._saving = self._saving, ""
            self._print(notice)
        elif self._notice is None or self.state.stop_requested:
            raise KeyboardInterrupt
        else:
            self.state.stop_requested = True
            self._print(self._notice)

    def _is_repeated(self) -> bool:
        """Return whether this Ctrl-C came before: torchrun gets it too, and passes it on."""
        last, self._last_ctrl_c = self._last_ctrl_c, time.monotonic()
        return "TORCHELASTIC_RUN_ID" in os.environ and self._last_ctrl_c - last < REPEAT_S

    def _on_terminate(self, signum: int) -> None:
        # Job schedulers may repeat SIGTERM while the run saves; they send SIGKILL when they mean it.
        if not self.state.terminated:
            self.state.terminated = self.state.stop_requested = True
            self.exit_code = 128 + signum
            if self._saving is None:
                self._print(f"{signal.Signals(signum).name}: stopping at the next chunk")

    def _on_stop_elsewhere(self) -> None:
        """Stop, because another rank does."""
        self.state.terminated = self.state.stop_requested = True

    def _print(self, line: str) -> None:
        """Print a line, even if the signal came while another one was being printed."""
        try:
            self.print_line(line)
        except RuntimeError:
            with suppress(OSError):
                os.write(2, f"{line}\n".encode())

    def __enter__(self) -> SignalHandler:
        if (others := watch.current()) is not None:
            others.on_stop, others.while_waiting = self._on_stop_elsewhere, self.check
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:
                self._streams[name] = stream, SafeStream(stream)
                setattr(sys, name, self._streams[name][1])
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, SIGHUP):
                if signum is not None and (signum != SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN):
                    self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if (others := watch.current()) is not None:
            others.on_stop, others.while_waiting = None, lambda: None
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        for name, (stream, safe) in self._streams.items():
            safe.end()
            if getattr(sys, name) is safe:
                setattr(sys, name, stream)
        self._streams.clear()


class SafeStream:
    """Output stream that never raises OSError, so a failed print cannot cost the trained model.

    Once its terminal or reader is gone, it drops everything. If a disk is full it drops the line, and tries again with
    the next one.
    """

    GONE = (errno.EIO, errno.EPIPE, errno.ENXIO, errno.EBADF, errno.ESTALE)

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_gone = False

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def end(self) -> None:
        """Flush what is left. Otherwise Python does it at exit, and changes the exit code if it cannot."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()
        except ValueError:
            pass  # already closed

    def _try(self, call: Callable[..., Any], *given: Any) -> None:
        if self._is_gone:
            return
        try:
            call(*given)
        except OSError as error:
            if error.errno in self.GONE:
                self._drop()

    def _drop(self) -> None:
        self._is_gone = True
        # This also drops what waits in its buffer and what other code writes to it.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
