"""dl2d pack: an environment that runs where it is unpacked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from cli.conftest import Dl2d


def test_an_environment_runs_where_it_is_unpacked(dl2d: Dl2d, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "greeting.py").write_text("import sys\n\n\ndef main():\n    print(sys.prefix, sys.argv[1:])\n")
    (packages / "__pycache__").mkdir()
    (packages / "__pycache__" / "greeting.pyc").write_text("")
    (packages / "editable.pth").write_text("/srv/source\n")
    (environment / "bin" / "dl2-run").touch()
    script = environment / "bin" / "greet"
    script.write_text(f"#!{environment}/bin/python\nfrom greeting import main\n\nmain()\n")
    script.chmod(0o755)
    archive = tmp_path / "env.tar.gz"
    ran = dl2d("pack", environment, "-o", archive)
    assert ran.status == 0
    assert "the nodes need /srv/source too" in ran.err
    shutil.rmtree(environment)
    elsewhere = tmp_path / "container 1" / "env"
    with tarfile.open(archive) as packed:
        assert not [name for name in packed.getnames() if "__pycache__" in name]
        packed.extraction_filter = lambda member, path: member  # warnings of newer Pythons; 3.11.2 has no filters
        packed.extractall(elsewhere)
    done = subprocess.run(
        ["env/bin/greet", "a b"], cwd=elsewhere.parent, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout.strip() == f"{elsewhere} ['a b']"


def test_a_folder_that_is_no_environment_is_refused(dl2d: Dl2d, tmp_path: Path) -> None:
    ran = dl2d("pack", tmp_path, "-o", tmp_path / "env.tar.gz")
    assert ran.status == 2
    assert f"{tmp_path} is not a virtual environment" in ran.err
    assert not list(tmp_path.iterdir())
    venv.create(tmp_path / "venv", with_pip=False)
    ran = dl2d("pack", tmp_path / "venv", "-o", tmp_path / "env.tar.gz")
    assert "has no bin/dl2-run: install dl2d in it" in ran.err
    assert sys.prefix != sys.base_prefix  # the default is the one that runs this
