"""What Ctrl-C, SIGTERM and a lost terminal mean during a run: stop between two chunks and save. Ctrl-C pressed again
ends at once."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from oomb.cli.errors import EXIT_INTERRUPTED

SIGHUP = getattr(signal, "SIGHUP", None)
"""A terminal or a connection that is gone; only Unix knows of it."""


class StopRequested(BaseException):
    """Raised between two chunks after a signal, where weights and optimizer are whole. Like KeyboardInterrupt it is no
    error, and handlers of errors let it through."""


class SignalHandler:
    """Takes the signals while its `with` lasts. At first Ctrl-C ends the program, as ever. SIGHUP stays ignored where
    it was (nohup). What is printed meanwhile raises no error, be the terminal there or not."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.stop_requested = False
        self.terminated = False
        """SIGTERM or SIGHUP has come: the run ends, whatever was to be skipped."""
        self._exit_code = EXIT_INTERRUPTED
        self._notice: str | None = None
        self._saving: str | None = None
        self._previous: dict[int, Any] = {}
        self._streams: dict[str, tuple[Any, SafeStream]] = {}

    @property
    def exit_code(self) -> int:
        return self._exit_code

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

    def release(self) -> None:
        """From here on Ctrl-C ends the program, as at first."""
        self._notice = self._saving = None

    def _on_signal(self, signum: int, frame: Any) -> None:
        if signum != signal.SIGINT:
            self._on_terminate(signum)
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

    def _on_terminate(self, signum: int) -> None:
        # Those who send it may send it again while we save; they have SIGKILL when they mean it.
        if not self.terminated:
            self.terminated = self.stop_requested = True
            self._exit_code = 128 + signum
            if self._saving is None:
                self._say(f"{signal.Signals(signum).name}: stopping at the next chunk")

    def _say(self, line: str) -> None:
        """The signal may have come in the very middle of printing another line."""
        try:
            self.say(line)
        except RuntimeError:
            with suppress(OSError):
                os.write(2, f"{line}\n".encode())

    def __enter__(self) -> SignalHandler:
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
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        for name, (stream, lasting) in self._streams.items():
            lasting.end()
            if getattr(sys, name) is lasting:
                setattr(sys, name, stream)
        self._streams.clear()


class SafeStream:
    """A stream to print to that raises no error of the system: nothing that is printed is worth a trained model.

    Once its terminal or its reader is gone, all that is written is dropped. What finds no room on a disk is dropped as
    well, and later lines are tried again.
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
        """Python writes what is left when it ends, and has an exit code of its own for where it cannot."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()
        except ValueError:
            pass  # closed by somebody else

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
        # Also what waits in its buffer, and what others write there.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
