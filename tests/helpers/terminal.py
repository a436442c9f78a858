"""Run a program on a pseudo-terminal and keep what it draws as a screen of text.

Run as a program, this file is the child: it trains as told over a pipe and waits at given chunks, so that tests can
look at the screen. One child serves many trainings, because starting it takes seconds.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import HANG_S, wait_until

CORNERS = "╭╮╰╯"
MARK = b"\0"
"""Written by the child between two frames, and not drawn."""
MOST_FRAMES = 40
"""Frames until a changed panel must appear. One is enough, unless a frame was being drawn at the change."""


class Terminal:
    """A child process on its own pseudo-terminal, and its screen."""

    def __init__(self, cwd: Path, on_hangup: signal.Handlers = signal.SIG_DFL) -> None:
        import pyte

        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        """Everything drawn since the last command."""
        self.master: int | None
        self.master, slave = pty.openpty()
        commands, self._to_child = os.pipe()
        self._from_child, reports = os.pipe()
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.child = subprocess.Popen(
            [sys.executable, __file__, str(commands), str(reports), str(int(on_hangup))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            pass_fds=(commands, reports),
            cwd=cwd,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        for fd in (slave, commands, reports):
            os.close(fd)
        self._reports = self._unseen = b""

    def train(self, *arguments: str, columns: int, lines: int, stops: list[Any] = [], **env: str) -> None:  # noqa: B006
        """Start a training. It waits for `resume` at each of `stops`: [steps done, pass, chunks done]."""
        self.screen.reset()
        self.raw = b""
        self.resize(columns, lines)
        asked = {"arguments": ["train", *arguments], "stops": stops, "env": env}
        self._tell(json.dumps(asked))

    def resize(self, columns: int, lines: int) -> None:
        assert self.master is not None
        self.screen.resize(lines, columns)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.kill(self.child.pid, signal.SIGWINCH)

    def hang_up(self) -> None:
        """Close the window: the system sends SIGHUP, and nothing can be written any more."""
        assert self.master is not None
        os.close(self.master)
        self.master = None

    def end(self) -> int:
        """End the child and return its exit code."""
        os.close(self._to_child)
        self._to_child = -1
        return self.child.wait(HANG_S)

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C at a stop and wait for the echo, which follows the signal.

        The child must be between two frames: the key discards output that has not been read yet.
        """
        assert self.master is not None
        self._tell("hold")
        self._show_until(MARK)
        os.write(self.master, b"\x03")
        self._show_until(b"^C")
        self._tell("let go")

    def resume(self) -> None:
        self._tell("go on")

    def report(self) -> dict[str, Any]:
        """Return the child's next report, {"at": stop} or {"exit": code}, with the screen up to date."""
        while b"\n" not in self._reports:
            self._read()
        line, _, self._reports = self._reports.partition(b"\n")
        if self.master is not None:
            self._show_until(MARK)
        return json.loads(line)

    def frame(self) -> list[str]:
        """Return the lines of the screen at a stop, after another frame."""
        num_drawn = len(self.raw)

        def is_drawn() -> bool:
            self._tell("look")
            self._show_until(MARK)
            return len(self.raw) > num_drawn

        wait_until(is_drawn, lambda: f"nothing is drawn any more; the screen:\n{self.text()}")
        return self.lines()

    def panel(self, width: int, *words: str, above: str = "") -> tuple[list[str], list[str]]:
        """Return the screen and the panel on it, once the panel has this width and these words in two frames."""
        for _ in range(MOST_FRAMES):
            lines = self.frame()
            try:
                drawn = panel_of(lines)
            except AssertionError:
                # The window is being resized.
                continue
            if len(drawn[0]) == width and all(word in "\n".join(drawn) for word in words) and above in "\n".join(lines):
                break
        else:
            raise AssertionError(f"no panel {width} wide with {words} and {above!r} above it:\n{self.text()}")
        lines = self.frame()
        return lines, panel_of(lines)

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        return "\n".join(self.lines()).strip()

    def _tell(self, command: str) -> None:
        os.write(self._to_child, f"{command}\n".encode())

    def _show_until(self, mark: bytes) -> None:
        """Draw what comes before the mark."""
        while mark not in self._unseen:
            self._read()
        seen, _, self._unseen = self._unseen.partition(mark)
        self._show(seen if mark == MARK else seen + mark)

    def _show(self, drawn: bytes) -> None:
        self.raw += drawn
        self._stream.feed(drawn)

    def _read(self) -> None:
        watched = [self._from_child] if self.master is None else [self.master, self._from_child]
        ready, _, _ = select.select(watched, [], [], HANG_S)
        for fd in ready:
            try:
                said = os.read(fd, 1 << 16)
            except OSError:  # the child closed its side of the terminal
                said = b""
            if fd == self._from_child:
                self._reports += said
            else:
                self._unseen += said
            if not said:
                ready = []
        if not ready:
            self._show(self._unseen)
            raise AssertionError(f"the child is gone, or says nothing; its screen:\n{self.text()}")

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for fd in (self.master, self._to_child, self._from_child):
            if fd is not None and fd >= 0:
                os.close(fd)


def panel_of(lines: list[str]) -> list[str]:
    """Return the panel's lines. Assert that there is one panel and that no line of it is torn."""
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
    # nohup makes the tests ignore it.
    signal.signal(signal.SIGHUP, signal.Handlers(int(sys.argv[3])))
    # A controlling terminal of its own, so that Ctrl-C reaches it.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch

    from oomb.cli import main as cli
    from oomb.cli.train.display import TrainingDisplay

    torch.set_num_threads(1)
    own, stops = TrainingDisplay.chunk_done, []

    def report(**said: Any) -> None:
        with suppress(OSError):  # the terminal is gone
            os.write(1, MARK)
        print(json.dumps(said), file=reports, flush=True)

    def chunk_done(self: Any, phase: str, done: int, total: int) -> None:
        own(self, phase, done, total)
        stop = [self._view.step, phase, done]
        if stop not in stops:
            return
        stops.remove(stop)
        # The panel's thread holds this lock while it draws a frame.
        between_frames = self._panel._lock
        with between_frames:
            report(at=stop)
        while (command := commands.readline()) in ("look\n", "hold\n"):
            with between_frames:
                os.write(1, MARK)
                if command == "hold\n":
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
