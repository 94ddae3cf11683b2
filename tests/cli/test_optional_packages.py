"""What is imported for which command, and what is said where a package is missing that only some commands need."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from dl2d.cli.main import COMMANDS
from dl2d.cli.optional_packages import EXTRAS
from dl2d.cli.policy_trials import learner_process

#: Each takes from a tenth of a second to several to import.
HEAVY = ("torch", "sklearn", "matplotlib", "gymnasium", "ray", "scipy", "numpy", "fastapi", "sqlalchemy", "pydantic",
         "structlog", "yaml", "httpx2")  # fmt: skip
OPTIONAL = tuple(sorted({module for modules in EXTRAS.values() for module in modules}))


def run(*commands: Sequence[str], without: tuple[str, ...] = ()) -> tuple[list[tuple[int, list[str]]], set[str]]:
    """Run commands in one new process that lacks some modules; status and lines of each, and what was imported."""
    script = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({without}))
from dl2d.cli.main import run
ended = []
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said): run(command)
    except SystemExit as exit: ended.append((exit.code or 0, [line for line in said.getvalue().splitlines() if line]))
print(json.dumps([ended, [name for name, module in sys.modules.items() if module is not None]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)], capture_output=True, text=True, check=True, timeout=100
    )
    ended, modules = json.loads(done.stdout)
    return ended, set(modules)


def test_help_imports_no_command_and_no_large_package() -> None:
    ended, modules = run(["--help"], ["--version"])
    assert [status for status, _ in ended] == [0, 0]
    assert modules.isdisjoint(HEAVY)
    ours = {name for name in modules if name.startswith(("dl2d", "pslite"))}
    assert ours == {"dl2d", "dl2d.cli", "dl2d.cli.main", "dl2d.cli.optional_packages", "dl2d.core", "dl2d.core.errors"}


@pytest.mark.parametrize(
    ("commands", "not_imported"),
    [
        (("submit", "status", "simulate", "train"), ("sqlalchemy", "fastapi")),
        (tuple(name for name in COMMANDS if name != "experiment"), OPTIONAL),
    ],
)
def test_every_command_has_help_without_any_extra(commands: tuple[str, ...], not_imported: tuple[str, ...]) -> None:
    ended, modules = run(*((command, "--help") for command in commands), without=OPTIONAL)
    for command, (status, lines) in zip(commands, ended, strict=True):
        assert status == 0
        assert lines[0].startswith(f"Usage: dl2d {command}")
    assert modules.isdisjoint(not_imported)


def test_a_missing_extra_is_said_in_one_sentence() -> None:
    pip = Path(sys.prefix) / "bin/pip"
    words_of = {
        (
            "train",
            "-w",
            "jobs.json",
        ): f"torch and matplotlib, not installed here; install with: {pip} install 'dl2d[train]'",
        ("train", "supervised", "--store", "sqlite:///x"): f"{pip} install 'dl2d[train]'",
        ("experiment", "run", "load"): f"matplotlib, not installed here; install with: {pip} install 'dl2d[simulate]'",
        ("demo",): f"torch and sklearn and matplotlib, not installed here; install with: {pip} install 'dl2d[demo]'",
    }
    ended, _ = run(*words_of, without=OPTIONAL)
    for (status, lines), words in zip(ended, words_of.values(), strict=True):
        assert status == 1
        (line,) = lines
        assert line.startswith("dl2d: this command needs ")
        assert line.endswith(words)


def test_a_learner_says_which_package_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def lacks_torch(_: object) -> None:
        raise ModuleNotFoundError(name="torch")

    for name in ("stand_back", "_end_with_the_daemon"):
        monkeypatch.setattr(learner_process, name, lambda *_: None)
    monkeypatch.setattr(learner_process, "_learn", lacks_torch)
    config = tmp_path / "dl2d.yaml"
    config.write_text(f"state_dir: {tmp_path}")
    with pytest.raises(SystemExit) as ended:
        learner_process.main(config)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("dl2d: the learner needs torch, not installed here; install with: ")


def test_the_extras_of_the_distribution_are_those_that_are_named() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    installed_by = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        packages = {text.partition(">")[0] for text in declared["optional-dependencies"][extra]}
        for module in modules:
            assert installed_by.get(module, [module])[0] in packages
