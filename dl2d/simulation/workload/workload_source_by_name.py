"""Workload sources as ``dl2d simulate --workload`` names them: a file, a generator, the kinds in a file, or a log."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from dl2d.core.errors import WorkloadError, did_you_mean, printable, shown
from dl2d.simulation.parse_key_value_options import key_values
from dl2d.simulation.workload.generators import GENERATORS, generate
from dl2d.simulation.workload.job_kind_sampling import KindsSettings, draw_kinds
from dl2d.simulation.workload.trace_readers import FORMATS, TraceSettings, read_trace, summary
from dl2d.simulation.workload.workload_file import Workload, read_workload

_PREFIX = re.compile(r"([a-z][a-z0-9-]+):(.*)", re.DOTALL)
_MAX_SEED = 2**63 - 1
#: What stands before a workload file whose kinds of jobs are drawn from.
KINDS = "kinds"


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    """A workload, and a line for people on how it came about (none for a workload file)."""

    workload: Workload
    note: str = ""


def load_source(source: str, *, seed: int = 0) -> LoadedWorkload:
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
    kind, name, query = _split(source)
    where = printable(source)
    if not kind:
        prefix = _PREFIX.fullmatch(source)
        if prefix and not _exists(source):
            known = ["generator", KINDS, *FORMATS]
            problem = f"there is no such file, and {prefix[1]!r} is no kind of source{did_you_mean(prefix[1], known)}"
            raise WorkloadError("", f"{problem}; there are {', '.join(known)}", where=where)
        return LoadedWorkload(read_workload(source))
    given = key_values(query.split("&") if query else (), "key=value", where=where)
    given = {key: unquote(value) for key, value in given.items()}
    own_seed = _seed(given, seed, where)
    try:
        if kind == "generator":
            workload = generate(name, given, np.random.default_rng(own_seed))
            return LoadedWorkload(workload, f"{where}: {_size(workload)}")
        if kind == KINDS:
            return _of_kinds(name, given, own_seed, where)
        read = read_trace(kind, Path(name), TraceSettings.parse(given), seed=own_seed)
    except WorkloadError as error:
        raise WorkloadError(error.key, error.problem, where=error.where or where, job=error.job) from None
    return LoadedWorkload(read.workload, f"{kind}:{printable(Path(name).name)}: {summary(read)}")


def named_file(source: str) -> tuple[str, str, str] | None:
    """The file that a source names: what stands before it (``itp:``), its path, and what follows (``?jobs=3``).

    None for a generator, and for ``kinds:`` without a file, which is still to be named. Whether there is such a file is
    not looked at.
    """
    kind, name, query = _split(source)
    if kind == "generator" or lacks_file(source):
        return None
    return kind and f"{kind}:", name, query and f"?{query}"


def matching_files(pattern: str) -> list[str]:
    """The files that match a shell pattern, in order; a text that is no pattern is a file's name."""
    # Patterns may be absolute, which those of pathlib may not.
    files = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207
    if not files:
        raise WorkloadError("", "no file matches", where=pattern)
    return files


def is_drawn(source: str) -> bool:
    """Whether each seed makes another workload of it."""
    return _split(source)[0] in ("generator", KINDS)


def lacks_file(source: str) -> bool:
    """Whether kinds of jobs are to be drawn from a file that is still to be named."""
    return _split(source)[:2] == (KINDS, "")


def with_kinds(source: str, path: str) -> str:
    """The source with this file in place of the one whose kinds of jobs it draws from; others as they are."""
    kind, _, query = _split(source)
    return f"{KINDS}:{path}{query and f'?{query}'}" if kind == KINDS else source


def source_forms() -> str:
    """For help texts: what may be given."""
    return f"a file, generator:NAME ({', '.join(GENERATORS)}), {KINDS}:FILE or FORMAT:FILE ({', '.join(FORMATS)})"


def _of_kinds(file: str, given: dict[str, str], seed: int, where: str) -> LoadedWorkload:
    if not file:
        raise WorkloadError("", f"no workload file is named whose kinds of jobs are drawn from: {KINDS}:FILE")
    known = read_workload(file)
    workload = draw_kinds(known, KindsSettings.parse(given), np.random.default_rng(seed), where=where)
    models = len({job.model for job in known.jobs})
    return LoadedWorkload(workload, f"{KINDS}:{printable(Path(file).name)}: {models} kinds, {_size(workload)}")


def _size(workload: Workload) -> str:
    return f"{len(workload.jobs)} jobs, {sum(group.count for group in workload.cluster)} nodes"


def _exists(source: str) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _split(source: str) -> tuple[str, str, str]:
    """Kind (empty for a workload file), name or path, and settings."""
    match = _PREFIX.fullmatch(source)
    if match is None or match[1] not in ("generator", KINDS, *FORMATS):
        return "", source, ""
    name, mark, query = match[2].rpartition("?")
    return (match[1], name, query) if mark and "=" in query else (match[1], match[2], "")


def _seed(given: dict[str, str], default: int, where: str) -> int:
    text = given.pop("seed", None)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _MAX_SEED):
        raise WorkloadError("seed", f"expected a whole number from 0 to {_MAX_SEED}, got {shown(text)}", where=where)
    return int(text)
