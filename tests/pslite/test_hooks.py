"""What dl2-run puts before the user's script: it changes nothing but what comes with mxnet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pslite.run import with_hooks


def test_a_sitecustomize_that_is_hidden_runs_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the site')")
    environ = with_hooks({"PYTHONPATH": str(tmp_path)})
    done = subprocess.run(
        [sys.executable, "-c", "print('the script')"], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["the site", "the script"]


def test_the_folder_is_named_once():
    once = with_hooks({})
    assert with_hooks(once) == once


def test_a_python_without_pslite_is_told_what_is_missing(tmp_path):
    (tmp_path / "mxnet.py").write_text("")
    environ = with_hooks({"PYTHONPATH": str(tmp_path)})
    # -S: without the folder in which pslite is installed; the hook is run by hand then
    hook = (
        f"import sys, runpy; runpy.run_path({str(Path(environ['PYTHONPATH'].partition(':')[0], 'sitecustomize.py'))!r})"
    )
    command = [sys.executable, "-S", "-c", f"{hook}; import mxnet"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has no pslite" in done.stderr
    assert "install pslite there" in done.stderr


def test_a_script_without_mxnet_does_not_load_ours():
    code = "import sys, json; sys.exit(any(name.startswith('pslite') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=with_hooks({}), check=False).returncode == 0
