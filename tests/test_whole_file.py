"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import pytest

from dl2d.whole_file import write_whole


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    file = tmp_path / "state.json"
    write_whole(file, "älter")
    write_whole(file, b"newer")
    assert file.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_leaves_the_older_file_and_nothing_else(tmp_path):
    file = tmp_path / "state.json"
    write_whole(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_in_its_place_is_an_error(tmp_path):
    (tmp_path / "state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "state.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
