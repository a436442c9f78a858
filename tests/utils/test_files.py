"""Files and folders that are complete or absent."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from oomb.utils import files

NO_PROCESS = 2**30
"""A process number that no system assigns."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    files.write_text(path, "old")
    with files.atomic_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == {"report.json"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "report.json"
    files.write_text(path, "old")
    with pytest.raises(error), files.atomic_file(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == {"report.json"}


def test_a_disk_that_is_full_at_fsync_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "report.json"
    files.write_text(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == {"report.json"}


def test_links_and_devices_are_written_directly(tmp_path: Path) -> None:
    files.write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    files.write_text(link, "text")
    assert link.is_symlink() and target.read_text() == "text"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, OSError])
def test_a_folder_is_replaced_or_kept(tmp_path: Path, error: type[BaseException] | None) -> None:
    folder = tmp_path / "model"
    with files.atomic_folder(folder) as partial:
        (partial / "old").touch()
    try:
        with files.atomic_folder(folder) as partial:
            (partial / "new").touch()
            assert names(folder) == {"old"}
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert names(folder) == ({"new"} if error is None else {"old"})
    assert names(tmp_path) == {"model"}


def test_a_folder_that_cannot_be_renamed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "model", Path.rename
    with files.atomic_folder(folder) as partial:
        (partial / "old").touch()

    def failing(self: Path, target: Path) -> Path:
        if target == folder and self.parent.name.startswith(".model.partial"):
            raise OSError(errno.EIO, "I/O error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="I/O"), files.atomic_folder(folder):
        pass
    assert names(tmp_path) == {"model"} and names(folder) == {"old"}


def test_leftover_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    (tmp_path / f".report.html.partial-{NO_PROCESS}").touch()
    (tmp_path / ".notes.partial").touch()
    with files.atomic_file(tmp_path / "report.html"):
        files.remove_leftovers(tmp_path)
        assert names(tmp_path) == {".notes.partial", f".report.html.partial-{os.getpid()}"}
    assert names(tmp_path) == {".notes.partial", "report.html"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("disk"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), True),
        (type("SafetensorError", (Exception,), {})("I/O error: No space left"), True),
        (type("SafetensorError", (Exception,), {})("invalid header"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_write_errors_are_recognized(error: Exception, expected: bool) -> None:
    assert files.is_write_error(error) is expected
