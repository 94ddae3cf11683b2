"""What is imported for which command, and what is said where a package is missing that only some commands need."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dl2d.cli.extras import EXTRAS
from dl2d.cli.main import COMMANDS

#: Each takes from a tenth of a second to several to import.
HEAVY = ("torch", "sklearn", "matplotlib", "gymnasium", "ray", "scipy", "numpy", "fastapi", "sqlalchemy", "pydantic",
         "structlog", "yaml", "httpx2")  # fmt: skip
OPTIONAL = tuple(sorted({module for modules in EXTRAS.values() for module in modules}))


def run(*arguments: str | Path, without: tuple[str, ...] = ()) -> tuple[int, list[str], set[str]]:
    """Exit status, lines printed and modules imported of a command, some modules being not installed."""
    script = f"""
import sys
sys.modules.update(dict.fromkeys({without}))
from dl2d.cli.main import run
try: run()
except SystemExit as ended: status = ended.code or 0
print()
print(status, *[name for name, module in sys.modules.items() if module is not None])
"""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=100)
    *lines, last = ran.stdout.splitlines()
    status, *modules = last.split()
    return int(status), [line for line in lines if line], set(modules)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_imports_no_command_and_no_large_package(option: str) -> None:
    status, _, modules = run(option)
    assert status == 0
    assert modules.isdisjoint(HEAVY)
    ours = {name for name in modules if name.startswith(("dl2d", "pslite"))}
    assert ours == {"dl2d", "dl2d.cli", "dl2d.cli.main", "dl2d.cli.extras", "dl2d.core", "dl2d.core.errors"}


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "experiment"])
def test_every_command_has_help_without_any_extra(command: str) -> None:
    status, said, modules = run(command, "--help", without=OPTIONAL)
    assert status == 0
    assert f"Usage: dl2d {command}" in said[1]
    if command in ("submit", "status", "simulate", "train"):
        assert modules.isdisjoint(("sqlalchemy", "fastapi"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "-w", "jobs.json"], "torch and matplotlib, not installed here: pip install 'dl2d[train]'"),
        (["train", "supervised", "--teacher", "drf", "-w", "jobs.json"], "pip install 'dl2d[train]'"),
        (["experiment", "run", "load"], "matplotlib, not installed here: pip install 'dl2d[simulate]'"),
        (["demo"], "torch and sklearn and matplotlib, not installed here: pip install 'dl2d[demo]'"),
    ],
)
def test_a_missing_extra_is_said_in_one_sentence(arguments: list[str], words: str) -> None:
    status, said, _ = run(*arguments, without=OPTIONAL)
    assert status == 1
    assert len(said) == 1
    assert said[0].startswith("dl2d: this needs ")
    assert said[0].endswith(words)


def test_the_extras_of_the_distribution_are_those_that_are_named() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    installed_by = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        packages = {text.partition(">")[0] for text in declared["optional-dependencies"][extra]}
        for module in modules:
            assert installed_by.get(module, [module])[0] in packages
