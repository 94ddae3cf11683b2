"""``dl2d pack``: a virtual environment as one archive, which YARN unpacks in each container of a job."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.submit import RUNNER
from dl2d.core.errors import RequestError

#: First lines of a script that runs the Python beside it, wherever that is; Python reads them as a text constant.
_RELOCATABLE = b"#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"


def pack(
    environment: Annotated[
        Path,
        typer.Argument(metavar="[VENV]", help="Folder of the virtual environment.", show_default="that of this dl2d"),
    ] = Path(sys.prefix),
    output: Annotated[Path, typer.Option("--output", "-o", help="The archive.")] = Path("env.tar.gz"),
) -> None:
    """Pack a virtual environment for `dl2d submit --rm yarn --archive`; nodes need the same Python under its path."""
    environment = environment.absolute()
    if not (environment / "pyvenv.cfg").is_file():
        raise RequestError("VENV", f"{environment} is not a virtual environment: it has no pyvenv.cfg")
    if not (environment / "bin" / RUNNER).exists():
        raise RequestError("VENV", f"{environment} has no bin/{RUNNER}: install dl2d in it")
    partial = output.with_name(f".{output.name}.partial")
    try:
        with tarfile.open(partial, "w:gz", compresslevel=6) as archive:
            paths = [path for path in sorted(environment.rglob("*")) if "__pycache__" not in path.parts]
            with typer.progressbar(paths, label="packing", file=sys.stderr) as shown:
                for path in shown:
                    archive.add(path, str(path.relative_to(environment)), recursive=False)
            for script in _scripts(environment):
                content = _RELOCATABLE + script.read_bytes().partition(b"\n")[2]
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


def _scripts(environment: Path) -> Iterator[Path]:
    """Scripts that name the environment's Python by its path."""
    start = f"#!{environment}/bin/python".encode()
    for path in sorted((environment / "bin").iterdir()):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(len(start)) == start:
                    yield path


def _outside(environment: Path) -> Iterator[str]:
    """Folders outside the environment from which it imports."""
    for file in environment.glob("lib/python*/site-packages/*.pth"):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/") and not Path(line).is_relative_to(environment):
                yield line
