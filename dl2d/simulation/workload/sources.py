"""Workload sources as ``dl2d simulate --workload`` names them: a file, a generator, the kinds in a file, or a log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import numpy as np

from dl2d.core.errors import WorkloadError
from dl2d.core.wording import did_you_mean, printable, shown
from dl2d.simulation.workload.format import Workload, read_workload
from dl2d.simulation.workload.generators import GENERATORS, generate
from dl2d.simulation.workload.kinds import KindsSettings, draw_kinds
from dl2d.simulation.workload.trace_readers import FORMATS, TraceSettings, read_trace, summary

_PREFIX = re.compile(r"([a-z][a-z0-9-]+):(.*)", re.DOTALL)
_MAX_SEED = 2**63 - 1
#: What stands before a workload file whose kinds of jobs are drawn from.
KINDS: Final = "kinds"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A workload, and a line for people on how it came about (none for a workload file)."""

    workload: Workload
    note: str = ""


def load_source(source: str, *, seed: int = 0) -> Sourced:
    """Read or make the workload that a text names.

    Parameters
    ----------
    source
        ``generator:NAME[?key=value&...]``, ``kinds:FILE[?key=value&...]``, ``FORMAT:FILE[?key=value&...]`` with a
        format of ``dl2d.simulation.workload.trace_readers.FORMATS``, or the path of a workload file. Values, not file
        names, may be percent-encoded. A ``?`` is taken as part of a file's name unless a ``=`` follows it.
        ``./sacct:x`` is a file.
    seed
        For what is drawn, unless ``seed`` is among the keys.

    Raises
    ------
    WorkloadError
        It is none of these, or cannot be read; names the source.
    """
    match = _PREFIX.fullmatch(source)
    kind, rest = match.groups() if match else ("", "")
    if kind == "generator":
        name, given = _settings(rest, source)
        drawn = np.random.default_rng(_seed(given, seed, source))
        try:
            workload = generate(name, given, drawn)
        except WorkloadError as error:
            raise _at(error, source) from None
        nodes = sum(group.count for group in workload.cluster)
        return Sourced(workload, f"{printable(source)}: {len(workload.jobs)} jobs, {nodes} nodes")
    if kind == KINDS:
        return _of_kinds(rest, seed, source)
    if kind in FORMATS:
        file, given = _settings(rest, source)
        own_seed = _seed(given, seed, source)
        try:
            settings = TraceSettings.parse(given)
        except WorkloadError as error:
            raise _at(error, source) from None
        read = read_trace(kind, Path(file), settings, seed=own_seed)
        return Sourced(read.workload, f"{kind}:{printable(Path(file).name)}: {summary(read)}")
    if kind and not _exists(source):
        known = ["generator", KINDS, *FORMATS]
        problem = f"there is no such file, and {kind!r} is no kind of source{did_you_mean(kind, known)}"
        raise WorkloadError("", f"{problem}; there are {', '.join(known)}", where=printable(source))
    return Sourced(read_workload(source))


def named_file(source: str) -> tuple[str, str, str] | None:
    """The file that a source names: what stands before it (``itp:``), its path, and what follows (``?jobs=3``).

    None for a generator, and for ``kinds:`` without a file, which is still to be named. Whether there is such a file is
    not looked at.
    """
    match = _PREFIX.fullmatch(source)
    kind, rest = match.groups() if match else ("", "")
    if kind == "generator":
        return None
    if kind not in (KINDS, *FORMATS):
        return "", source, ""
    path = _parts(rest)[0]
    return (f"{kind}:", path, rest[len(path) :]) if path or kind != KINDS else None


def is_drawn(source: str) -> bool:
    """Whether each seed makes another workload of it."""
    return source.startswith(("generator:", f"{KINDS}:"))


def lacks_file(source: str) -> bool:
    """Whether kinds of jobs are to be drawn from a file that is still to be named."""
    return source.startswith(f"{KINDS}:") and named_file(source) is None


def with_kinds(source: str, path: str) -> str:
    """The source with this file in place of the one whose kinds of jobs it draws from; others as they are."""
    if not source.startswith(f"{KINDS}:"):
        return source
    rest = source.removeprefix(f"{KINDS}:")
    return f"{KINDS}:{path}{rest[len(_parts(rest)[0]) :]}"


def source_forms() -> str:
    """For help texts: what may be given."""
    return f"a file, generator:NAME ({', '.join(GENERATORS)}), {KINDS}:FILE or FORMAT:FILE ({', '.join(FORMATS)})"


def _of_kinds(rest: str, seed: int, source: str) -> Sourced:
    file, given = _settings(rest, source)
    own_seed = _seed(given, seed, source)
    if not file:
        problem = f"no workload file is named whose kinds of jobs are drawn from: {KINDS}:FILE"
        raise WorkloadError("", problem, where=printable(source))
    known = read_workload(file)
    try:
        settings = KindsSettings.parse(given)
        workload = draw_kinds(known, settings, np.random.default_rng(own_seed), where=printable(source))
    except WorkloadError as error:
        raise _at(error, source) from None
    nodes = sum(group.count for group in workload.cluster)
    models = len({job.model for job in known.jobs})
    note = f"{KINDS}:{printable(Path(file).name)}: {models} kinds, {len(workload.jobs)} jobs, {nodes} nodes"
    return Sourced(workload, note)


def _exists(source: str) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _parts(rest: str) -> tuple[str, str]:
    """Name and settings of what stands behind the first colon."""
    name, mark, query = rest.rpartition("?")
    return (name, query) if mark and "=" in query else (rest, "")


def _settings(rest: str, source: str) -> tuple[str, dict[str, str]]:
    name, query = _parts(rest)
    if not query:
        return name, {}
    given: dict[str, str] = {}
    for part in query.split("&"):
        key, equals, value = part.partition("=")
        if not equals or key in given:
            problem = "is given twice" if equals else "expected key=value"
            raise WorkloadError(printable(key), problem, where=printable(source))
        given[key] = unquote(value)
    return name, given


def _seed(given: dict[str, str], default: int, source: str) -> int:
    text = given.pop("seed", None)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _MAX_SEED):
        raise WorkloadError("seed", f"expected a whole number of 0 or more, got {shown(text)}", where=printable(source))
    return int(text)


def _at(error: WorkloadError, source: str) -> WorkloadError:
    return WorkloadError(error.key, error.problem, where=error.where or printable(source), job=error.job)
