"""``dl2d pack``: a virtual environment as one archive, which YARN unpacks in each container of a job."""

from __future__ import annotations

import ast
import io
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.jobs.submit import RUNNER
from dl2d.cli.shared_options import option
from dl2d.core.errors import RequestError

#: First lines of a script that runs the Python beside it, wherever that is; Python reads them as a text constant.
_RELOCATABLE = b"#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"
#: First lines of a script with its Python, as pip writes them: through sh where the path has a space or is long.
_FIRST_LINES = re.compile(rb"#!(?:/bin/sh\n'''exec' ([^\n]+) \"\$0\" \"\$@\"\n' '''|([^\n]+))\n")
_MAX_FIRST_LINES = 8192
#: Packages and their places, in the module that setuptools adds for an editable installation.
_MAPPING = re.compile(r"^MAPPING\b[^=\n]*= (\{.*\})$", re.MULTILINE)


def pack(
    environment: Annotated[
        Path,
        typer.Argument(metavar="[VENV]", help="Folder of the virtual environment.", show_default="that of this dl2d"),
    ] = Path(sys.prefix),
    output: Annotated[Path, option("The archive.", "--output", "-o")] = Path("env.tar.gz"),
) -> None:
    """Pack a virtual environment for `dl2d submit --rm yarn --archive`; nodes need the same Python under its path."""
    environment = environment.resolve()
    if not (environment / "pyvenv.cfg").is_file():
        raise RequestError("VENV", f"{environment} is not a virtual environment: it has no pyvenv.cfg")
    if not (environment / "bin" / RUNNER).exists():
        raise RequestError("VENV", f"{environment} has no bin/{RUNNER}: install dl2d in it")
    scripts = {script: _RELOCATABLE + rest for script, rest in _scripts(environment)}
    if environment / "bin" / RUNNER not in scripts:
        text = f"{environment}/bin/{RUNNER} does not name the Python beside it: install dl2d in this environment again"
        raise RequestError("VENV", text)
    partial = output.with_name(f".{output.name}.partial")
    paths = [path for path in sorted(environment.rglob("*")) if _is_packed(path, output, partial)]
    try:
        with tarfile.open(partial, "w:gz", compresslevel=6) as archive:
            with typer.progressbar(paths, label="packing", file=sys.stderr) as shown:
                for path in shown:
                    archive.add(path, str(path.relative_to(environment)), recursive=False)
            for script, content in scripts.items():
                member = archive.gettarinfo(str(script), str(script.relative_to(environment)))
                member.size = len(content)
                # The later of two members with a name is the one that is kept.
                archive.addfile(member, io.BytesIO(content))
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    typer.echo(f"packed {environment} into {output} ({output.stat().st_size / 1e6:.0f} MB)")
    for folder in _outside(environment):
        typer.echo(f"packages are installed in editable mode: the nodes need {folder} too", err=True)


def _is_packed(path: Path, *archives: Path) -> bool:
    """Whether a file of the environment is to be in the archive: no caches, and not the archive itself."""
    return "__pycache__" not in path.parts and not any(
        path.name == archive.name and path.parent.samefile(archive.parent) for archive in archives
    )


def _scripts(environment: Path) -> Iterator[tuple[Path, bytes]]:
    """Scripts that are run by the environment's Python, each with what follows its first lines."""
    folder = environment / "bin"
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                start = _FIRST_LINES.match(file.read(_MAX_FIRST_LINES))
            if start is None:
                continue
            if _is_python_in(folder, (start[1] or start[2]).decode(errors="replace").strip("'\"")):
                yield path, path.read_bytes()[start.end() :]


def _is_python_in(folder: Path, name: str) -> bool:
    """Whether a script's Python is that of this folder: by its path, through a link too, or beside the script."""
    python = Path(name)
    return name.startswith("$(dirname -- ") or (
        python.name.startswith("python") and python.parent.resolve() == folder.resolve()
    )


def _outside(environment: Path) -> Sequence[str]:
    """Folders and modules outside the environment from which it imports."""
    found: list[str] = []
    for file in environment.glob("lib/python*/site-packages/*.pth"):
        found += file.read_text(encoding="utf-8", errors="replace").splitlines()
    for file in environment.glob("lib/python*/site-packages/__editable__*finder.py"):
        mapping = _MAPPING.search(file.read_text(encoding="utf-8", errors="replace"))
        found += ast.literal_eval(mapping[1]).values() if mapping is not None else ()
    outside = (place for place in found if place[:1] == "/" and not Path(place).resolve().is_relative_to(environment))
    return list(dict.fromkeys(outside))
