"""dl2d pack: an environment that runs where it is unpacked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from cli.conftest import Dl2d


def first_lines(folder: Path) -> str:
    """What pip puts before a script of an environment."""
    python = f"{folder}/bin/python"
    if " " in python:
        return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    if len(python) > 124:
        return f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n"
    return f"#!{python}\n"


def unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack an archive; returns the names in it."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = lambda member, path: member  # warnings of newer Pythons; 3.11.2 has no filters
        packed.extractall(folder)
        return packed.getnames()


@pytest.mark.parametrize("name", ["venv", "virtual environment", "v" * 130])
def test_an_environment_runs_where_it_is_unpacked(dl2d: Dl2d, tmp_path: Path, name: str) -> None:
    environment = tmp_path / name
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "greeting.py").write_text("import sys\n\n\ndef main():\n    print(sys.prefix, sys.argv[1:])\n")
    (packages / "__pycache__").mkdir()
    (packages / "__pycache__" / "greeting.pyc").write_text("")
    (packages / "editable.pth").write_text("/srv/source\n")
    (packages / "__editable___tool_finder.py").write_text("MAPPING: dict[str, str] = {'tool': '/srv/tool/src'}\n")
    script = environment / "bin" / "dl2-run"
    script.write_text(f"{first_lines(environment)}from greeting import main\n\nmain()\n")
    script.chmod(0o755)
    archive = tmp_path / "env.tar.gz"
    ran = dl2d("pack", environment, "-o", archive)
    assert ran.status == 0
    assert "the nodes need /srv/source too" in ran.err
    assert "the nodes need /srv/tool/src too" in ran.err
    shutil.rmtree(environment)
    elsewhere = tmp_path / "container 1" / "env"
    assert not [name for name in unpack(archive, elsewhere) if "__pycache__" in name]
    done = subprocess.run(
        ["env/bin/dl2-run", "a b"], cwd=elsewhere.parent, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.strip() == f"{elsewhere} ['a b']"


def test_an_environment_that_is_known_by_a_link_is_packed_again_and_again(dl2d: Dl2d, tmp_path: Path) -> None:
    venv.create(tmp_path / "real", with_pip=False)
    (tmp_path / "link").symlink_to("real")
    script = tmp_path / "real" / "bin" / "dl2-run"
    script.write_text(f"{first_lines(tmp_path / 'link')}import sys\n\nprint(sys.prefix)\n")
    script.chmod(0o755)
    archive = tmp_path / "real" / "env.tar.gz"
    for _ in range(2):
        assert dl2d("pack", tmp_path / "real", "-o", archive).status == 0
    assert not [name for name in unpack(archive, tmp_path / "again") if "env.tar.gz" in name]
    # What was unpacked can be packed too, through a link as well.
    (tmp_path / "other").symlink_to("again")
    assert dl2d("pack", tmp_path / "other", "-o", tmp_path / "env.tar.gz").status == 0
    unpack(tmp_path / "env.tar.gz", tmp_path / "env")
    done = subprocess.run([tmp_path / "env/bin/dl2-run"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "env")


def test_an_environment_whose_runner_has_another_python_is_refused(dl2d: Dl2d, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "venv/bin/dl2-run").write_text(f"{first_lines(tmp_path / 'moved')}import sys\n")
    ran = dl2d("pack", tmp_path / "venv", "-o", tmp_path / "env.tar.gz")
    assert ran.status == 2
    assert "dl2-run does not name the Python beside it: install dl2d in this environment again" in ran.err
    assert not (tmp_path / "env.tar.gz").exists()


def test_a_folder_that_is_no_environment_is_refused(dl2d: Dl2d, tmp_path: Path) -> None:
    ran = dl2d("pack", tmp_path, "-o", tmp_path / "env.tar.gz")
    assert ran.status == 2
    assert f"{tmp_path} is not a virtual environment" in ran.err
    assert not list(tmp_path.iterdir())
    venv.create(tmp_path / "venv", with_pip=False)
    ran = dl2d("pack", tmp_path / "venv", "-o", tmp_path / "env.tar.gz")
    assert "has no bin/dl2-run: install dl2d in it" in ran.err
    assert sys.prefix != sys.base_prefix  # the default is the one that runs this
