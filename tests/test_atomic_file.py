"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dl2d.atomic_file import write_atomically


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    file = tmp_path / "state.json"
    write_atomically(file, "älter")
    write_atomically(file, b"newer")
    assert file.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_leaves_the_older_file_and_nothing_else(tmp_path):
    file = tmp_path / "state.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_in_its_place_is_an_error(tmp_path):
    (tmp_path / "state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "state.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    (victim := tmp_path / "victim").write_text("kept")
    (part := tmp_path / f".state.json.{os.getpid()}.partial").symlink_to(victim)
    write_atomically(tmp_path / "state.json", "new")
    assert (victim.read_text(), (tmp_path / "state.json").read_text()) == ("kept", "new")

    part.symlink_to(victim)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as if it were put there right after
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "state.json", "newer")
    assert victim.read_text() == "kept"
