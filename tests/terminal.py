"""A terminal without a window: a program runs on a pseudo-terminal, and what it draws is kept as a screen of text.

Run as a program, this is the child: it trains as it is told on a pipe, and waits at the chunks that it is told of, so
that the screen can be looked at while it stands still. One child serves many trainings: its start takes seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

CORNERS = "╭╮╰╯"


class Terminal:
    """A child on a pseudo-terminal of its own, and its screen."""

    def __init__(self, cwd: Path, on_hangup: signal.Handlers = signal.SIG_DFL) -> None:
        import pyte

        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        """All that was drawn since the last command."""
        self.master: int | None
        self.master, slave = pty.openpty()
        commands, self._to_child = os.pipe()
        self._from_child, reports = os.pipe()
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.child = subprocess.Popen(
            [sys.executable, __file__, str(commands), str(reports)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            pass_fds=(commands, reports),
            cwd=cwd,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
            preexec_fn=lambda: _begin(on_hangup),
        )
        for fd in (slave, commands, reports):
            os.close(fd)
        self._reports = b""

    def train(self, *arguments: str, columns: int, lines: int, stops: list[Any] = [], **env: str) -> None:  # noqa: B006
        """Starts a training. `stops`: [steps done, pass, chunks done] where it is to wait for `go_on`."""
        self.screen.reset()
        self.raw = b""
        self.resize(columns, lines)
        asked = {"arguments": ["train", *arguments], "stops": stops, "env": env}
        os.write(self._to_child, f"{json.dumps(asked)}\n".encode())

    def resize(self, columns: int, lines: int) -> None:
        assert self.master is not None
        self.screen.resize(lines, columns)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.kill(self.child.pid, signal.SIGWINCH)

    def hang_up(self) -> None:
        """The window is closed, or the connection lost: the system sends SIGHUP, and nothing can be written."""
        assert self.master is not None
        os.close(self.master)
        self.master = None

    def end(self) -> int:
        """Nothing more is asked of the child; its exit code."""
        os.close(self._to_child)
        self._to_child = -1
        return self.child.wait(60)

    def type(self, text: str) -> None:
        assert self.master is not None
        os.write(self.master, text.encode())

    def go_on(self) -> None:
        os.write(self._to_child, b"go on\n")

    def watch(self, duration: float) -> list[str]:
        """Lets the child draw for so long; the lines of the screen then."""
        until = time.monotonic() + duration
        while (left := until - time.monotonic()) > 0:
            self._read(left)
        return [line.rstrip() for line in self.screen.display]

    def panel(self, width: int, *words: str, timeout: float = 30.0) -> tuple[list[str], list[str]]:
        """The screen and the panel on it, once that is so wide and has these words, and stays so."""
        until = time.monotonic() + timeout
        while True:
            lines = self.watch(0.3)
            try:
                drawn = panel_of(lines)
                assert len(drawn[0]) == width, "\n".join(lines)
                assert all(word in "\n".join(drawn) for word in words), "\n".join(lines)
                break
            except AssertionError:
                # On a busy machine the next frame may be a while in coming.
                if time.monotonic() > until:
                    raise
        lines = self.watch(0.3)
        return lines, panel_of(lines)

    def report(self, timeout: float = 120.0) -> dict[str, Any]:
        """What the child says next: {"at": stop} or {"exit": code}."""
        until = time.monotonic() + timeout
        while b"\n" not in self._reports:
            assert time.monotonic() < until, f"the child says nothing; its screen:\n{self.text()}"
            self._read(0.2)
        line, _, self._reports = self._reports.partition(b"\n")
        return json.loads(line)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).strip()

    def _read(self, timeout: float) -> None:
        watched = [self._from_child] if self.master is None else [self.master, self._from_child]
        ready, _, _ = select.select(watched, [], [], timeout)
        if self.master is not None and self.master in ready:
            try:
                drawn = os.read(self.master, 1 << 16)
            except OSError:  # the child is gone, and its side of the terminal with it
                drawn = b""
            self.raw += drawn
            self._stream.feed(drawn)
        if self._from_child in ready:
            self._reports += os.read(self._from_child, 1 << 16)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for fd in (self.master, self._to_child, self._from_child):
            if fd is not None and fd >= 0:
                os.close(fd)


def _begin(on_hangup: signal.Handlers) -> None:
    """In the child."""
    # Whoever runs the tests under nohup has it ignored.
    signal.signal(signal.SIGHUP, on_hangup)
    # Its own controlling terminal, so that Ctrl-C reaches it.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def panel_of(lines: list[str]) -> list[str]:
    """The panel's lines. There is exactly one, and none of its lines is torn."""
    tops = [index for index, line in enumerate(lines) if "╭" in line]
    bottoms = [index for index, line in enumerate(lines) if "╰" in line]
    assert len(tops) == len(bottoms) == 1, "\n".join(lines)
    panel = lines[tops[0] : bottoms[0] + 1]
    width = len(panel[0])
    assert re.fullmatch(r"╭─.*─╮", panel[0]) and re.fullmatch(r"╰─+╯", panel[-1]), "\n".join(lines)
    for line in panel[1:-1]:
        assert re.fullmatch(r"│ .* │", line) and not set(CORNERS) & set(line), "\n".join(lines)
        assert line.count("│") == 2, "\n".join(lines)
    assert {len(line) for line in panel} == {width}, "\n".join(lines)
    assert not any(lines[bottoms[0] + 1 :]), "\n".join(lines)
    return panel


def main() -> None:
    commands, reports = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    from oomb import cli
    from oomb.progress import TrainingDisplay

    torch.set_num_threads(1)
    own, stops = TrainingDisplay.chunk_done, []

    def report(**said: Any) -> None:
        print(json.dumps(said), file=reports, flush=True)

    def chunk_done(self: Any, phase: str, done: int, total: int) -> None:
        own(self, phase, done, total)
        stop = [self._view.step, phase, done]
        if stop in stops:
            stops.remove(stop)
            report(at=stop)
            commands.readline()

    TrainingDisplay.chunk_done = chunk_done  # type: ignore[method-assign]
    before = dict(os.environ)
    while line := commands.readline():
        asked = json.loads(line)
        os.environ.clear()
        os.environ.update(before | asked["env"])
        stops[:] = asked["stops"]
        report(exit=cli.app(asked["arguments"], standalone_mode=False))


if __name__ == "__main__":
    main()
