"""Readers of job logs: Philly, ITP (ElasticFlow), Alibaba openb and Slurm's ``sacct``.

Files may be gzipped. They are read line by line; what is malformed is an error that names file, line and column, what
is merely of no use (never started, still running, no length) is left out and counted.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, TextIO

from dl2d.core.errors import WorkloadError, shown
from dl2d.simulation.parse_key_value_options import within
from dl2d.simulation.workload.past_job_conversion import PastJob, Settings, convert
from dl2d.simulation.workload.workload_file import MAX_JOBS, Workload

#: Usable rows that are kept while a log is read; about 300 MB.
MAX_ROWS = 1_000_000
_ENCODING = "utf-8-sig"
_MAX_COLUMNS = 500
_MAX_SECONDS = 1e12
_MAX_GPUS = 10**7

NO_TIME = "no start or end"
NO_LENGTH = "ran for no time"
NOT_ENDED = "not ended"
STEP = "a step, not a job"
ARRAY_REST = "tasks of an array that have not started"
AGAIN = "an id a second time"
OUTSIDE = "outside the window"
BEYOND = "beyond the number of jobs asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings(Settings):
    """What part of a log to take."""

    #: Most jobs, the first of the window; 0: all, up to 200,000.
    jobs: int = within(0, 0, MAX_JOBS)
    #: Window of submit times, in hours from the first usable job; 0 hours: to the end.
    start_hours: float = within(0.0, 0.0, 1e8)
    hours: float = within(0.0, 0.0, 1e8)


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A workload read from a log; ``rows`` = jobs of the workload + all of ``left_out``."""

    workload: Workload
    #: Rows of the file, its header not counted.
    rows: int
    #: Rows left out, by reason.
    left_out: Mapping[str, int]


class _Row:
    """One line by column; reading a cell that is malformed raises with file, line and column."""

    __slots__ = ("_cells", "_where", "line")

    def __init__(self, cells: Mapping[str, str], where: str, line: int) -> None:
        self._cells = cells
        self._where = where
        self.line = line

    def __contains__(self, column: str) -> bool:
        return column in self._cells

    def text(self, column: str) -> str:
        """A cell as it is, without spaces around; nothing where there is no such column."""
        return self._cells.get(column, "").strip()

    def bad(self, column: str, problem: str) -> NoReturn:
        """Raise the error for one cell."""
        raise WorkloadError(f"line {self.line}: {column}", problem, where=self._where)

    def number(self, column: str, *, most: float = _MAX_SECONDS, least: float = -_MAX_SECONDS) -> float:
        """A cell as a number."""
        return self.as_number(column, self.text(column), least=least, most=most)

    def as_number(self, column: str, text: str, *, least: float, most: float) -> float:
        """Part of a cell as a number."""
        try:
            value = float(text)
        except ValueError:
            self.bad(column, f"expected a number, got {shown(text)}")
        if not least <= value <= most:
            self.bad(column, f"expected a number from {least:g} to {most:g}, got {shown(text)}")
        return value

    def count(self, column: str, *, most: int = _MAX_GPUS) -> int:
        """A cell as a whole number of 0 or more."""
        value = self.number(column, least=0.0, most=float(most))
        if value != int(value):
            self.bad(column, f"expected a whole number, got {shown(self.text(column))}")
        return int(value)

    def time(self, column: str) -> float:
        """A cell as seconds since 1970: a date and time (UTC where no zone is given), or a number of seconds."""
        text = self.text(column)
        if text.lstrip("-").isdecimal():
            return self.number(column)
        try:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            self.bad(column, f"expected a time such as 2024-05-06T07:08:09, got {shown(text)}")


#: What a row is: a job, or why it is none.
_Reader = Callable[[_Row], PastJob | str]


@dataclass(frozen=True, slots=True)
class _Format:
    read: _Reader
    #: Columns without which a file is not of this format, in lower case.
    columns: tuple[str, ...]


def _checked(job: PastJob) -> PastJob | str:
    return job if job.seconds > 0 and job.gpus + job.cpus > 0 else NO_LENGTH


def _philly(row: _Row) -> PastJob | str:
    # The list has no ids: a job is called by its line.
    submit, seconds = row.time("timestamp"), row.number("duration")
    return _checked(PastJob(str(row.line), submit, seconds, row.count("num_gpus"), cpus=1.0))


def _itp(row: _Row) -> PastJob | str:
    submit, seconds = row.number("submission_time"), row.number("duration")
    return _checked(PastJob(_plain_id(row, "job_id"), submit, seconds, row.count("num_gpu"), cpus=1.0))


def _openb(row: _Row) -> PastJob | str:
    if not row.text("scheduled_time") or not row.text("deletion_time"):
        return NO_TIME
    seconds = row.number("deletion_time") - row.number("scheduled_time")
    gpus = row.count("num_gpu")
    share = row.number("gpu_milli", least=0.0, most=1000.0) / 1000.0 if gpus == 1 and row.text("gpu_milli") else 1.0
    cpus = row.number("cpu_milli", least=0.0, most=1e9) / 1000.0
    job = PastJob(_plain_id(row, "name"), row.number("creation_time"), seconds, gpus, cpus=cpus, gpu_share=share)
    return _checked(job)


_UNENDED = frozenset({"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "CONFIGURING", "COMPLETING"})
_UNKNOWN = frozenset({"", "unknown", "none", "n/a", "invalid"})
_JOB_ID = re.compile(r"\d{1,18}(?:_(?P<task>\d{1,18}|\[[^\]]*\]?(?:\.\.\.)?)|\+\d{1,18})?(?P<step>\.\S+)?", re.ASCII)
_ELAPSED = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,8}):(\d{1,2})(?:\.\d{1,9})?", re.ASCII)


def _sacct(row: _Row) -> PastJob | str:
    identity = _JOB_ID.fullmatch(row.text("jobid"))
    if identity is None:
        row.bad("jobid", f"expected a job id of Slurm, such as 12, 12_3 or 12.batch, got {shown(row.text('jobid'))}")
    if identity["step"]:
        return STEP
    if (identity["task"] or "").startswith("["):
        return ARRAY_REST
    # ``CANCELLED by 1000`` is one state with its user.
    if row.text("state").split(" ")[0].upper() in _UNENDED:
        return NOT_ENDED
    if row.text("submit").lower() in _UNKNOWN:
        return NO_TIME
    seconds = _ran_for(row)
    if seconds is None:
        return NO_TIME
    gpus, cpus = _allocated(row)
    return _checked(PastJob(row.text("jobid").replace("+", "-"), row.time("submit"), seconds, gpus, cpus=cpus))


def _ran_for(row: _Row) -> float | None:
    """Seconds from start to end, or nothing where either is unknown."""
    for column in ("start", "end"):
        if column in row and row.text(column).lower() in _UNKNOWN:
            return None
    if row.text("elapsedraw"):
        return row.number("elapsedraw", least=0.0)
    if (text := row.text("elapsed")).lower() not in _UNKNOWN:
        match = _ELAPSED.fullmatch(text)
        if match is None:
            row.bad("elapsed", f"expected [days-]hours:minutes:seconds, got {shown(text)}")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds
    if "start" in row and "end" in row:
        return row.time("end") - row.time("start")
    return None


def _allocated(row: _Row) -> tuple[int, float]:
    """GPUs and cores: of AllocTRES where it is filled, else of ReqTRES; GPUs that these lack, of the older columns."""
    gpus = cpus = 0.0
    for column in ("alloctres", "reqtres"):
        if text := row.text(column):
            gpus, cpus = _tres(row, column, text)
            break
    if not gpus:  # many sites do not count GPUs among TRES
        for column in ("allocgres", "reqgres"):
            if text := row.text(column):
                gpus = _gres(row, column, text)
                break
    for column in ("ncpus", "alloccpus", "reqcpus"):
        if row.text(column):
            cpus = cpus or float(row.count(column))
    return int(gpus), max(1.0, cpus)


def _tres(row: _Row, column: str, text: str) -> tuple[float, float]:
    """``billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G``; the plain gpu is the total of its types."""
    total: float | None = None
    typed = cpus = 0.0
    for entry in text.split(","):
        name, equals, amount = entry.partition("=")
        if not equals:
            row.bad(column, f"expected name=amount, got {shown(entry)}")
        if name == "gres/gpu" or name.startswith("gres/gpu:") or name == "cpu":
            value = row.as_number(column, amount, least=0.0, most=float(_MAX_GPUS))
            if value != int(value):
                row.bad(column, f"expected a whole number of {name}, got {shown(amount)}")
            if name == "cpu":
                cpus = value
            elif name == "gres/gpu":
                total = value
            else:
                typed += value
    return (typed if total is None else total), cpus


def _gres(row: _Row, column: str, text: str) -> float:
    """``gpu:2`` or ``gpu:a100:2``, per node in older Slurm: taken times NNodes."""
    gpus = 0.0
    for entry in text.split(","):
        parts = entry.split("(")[0].split(":")
        if parts[0] == "gpu":
            gpus += row.as_number(column, parts[-1], least=0.0, most=1e5) if len(parts) > 1 else 1.0
    nodes = row.count("nnodes", most=100_000) if row.text("nnodes") else 1
    return math.floor(gpus) * max(1, nodes)


_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def _plain_id(row: _Row, column: str) -> str:
    text = row.text(column)
    if not _PLAIN_ID.fullmatch(text):
        row.bad(column, f"expected up to 64 letters, digits, _ and -, got {shown(text)}")
    return text


#: By name, as ``NAME:FILE`` has it.
FORMATS: Mapping[str, _Format] = {
    "sacct": _Format(_sacct, ("jobid", "submit")),
    "philly": _Format(_philly, ("timestamp", "duration", "num_gpus")),
    "itp": _Format(_itp, ("job_id", "submission_time", "duration", "num_gpu")),
    "openb": _Format(
        _openb, ("name", "cpu_milli", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")
    ),
}


def read_trace(name: str, path: Path, settings: TraceSettings, *, seed: int = 0) -> ReadTrace:
    """Read a log of one of the ``FORMATS`` as a workload.

    Models are drawn as ``dl2d.simulation.workload.past_job_conversion.model_by_hash`` says; ``convert`` says what
    becomes of the rest.

    Raises
    ------
    WorkloadError
        The file cannot be read, is not of the format, is too large or has no usable job; names file, line and column.
    """
    where = str(path)
    jobs: list[PastJob] = []
    left_out = Counter[str]()
    seen: set[str] = set()
    rows = 0
    try:
        with _opened(path) as lines:
            for row in _rows(lines, FORMATS[name], where):
                rows += 1
                job = FORMATS[name].read(row)
                if isinstance(job, str):
                    left_out[job] += 1
                elif job.id in seen:
                    left_out[AGAIN] += 1
                else:
                    seen.add(job.id)
                    jobs.append(job)
                    if len(jobs) > MAX_ROWS:
                        raise WorkloadError("", f"more than {MAX_ROWS} usable rows; cut it", where=where)
    except UnicodeDecodeError:
        raise WorkloadError("", f"is not UTF-8, after {rows} rows", where=where) from None
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise WorkloadError.unreadable(where, error) from None
    taken = _window(jobs, settings, left_out)
    description = f"read from {path.name} ({name})"
    if not taken:
        raise WorkloadError("", f"no job can be used of {rows} rows{_reasons(left_out)}", where=where)
    converted = convert(taken, settings, seed=seed, where=where, description=description)
    left_out.update(converted.left_out)
    return ReadTrace(converted.workload, rows, dict(sorted(left_out.items())))


def summary(read: ReadTrace) -> str:
    """For people: how much of a log was taken, and why the rest was not."""
    counts = f"{read.rows} rows, {len(read.workload.jobs)} jobs"
    return f"{counts}, {sum(group.count for group in read.workload.cluster)} nodes{_reasons(read.left_out)}"


def _reasons(left_out: Mapping[str, int]) -> str:
    listed = ", ".join(f"{reason} ({count})" for reason, count in left_out.items() if count)
    return f"; left out: {listed}" if listed else ""


def _window(jobs: list[PastJob], settings: TraceSettings, left_out: Counter[str]) -> list[PastJob]:
    if not jobs:
        return []
    jobs = sorted(jobs, key=lambda job: (job.submit, job.id))
    start = jobs[0].submit + 3600.0 * settings.start_hours
    end = start + 3600.0 * settings.hours if settings.hours else math.inf
    inside = [job for job in jobs if start <= job.submit < end]
    taken = inside[: settings.jobs or len(inside)]
    for reason, count in ((OUTSIDE, len(jobs) - len(inside)), (BEYOND, len(inside) - len(taken))):
        if count:
            left_out[reason] += count
    return taken


def _opened(path: Path) -> TextIO:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
    except ValueError as error:  # a NUL in the name
        raise WorkloadError.unreadable(shown(str(path)), error) from None
    return (
        gzip.open(path, "rt", encoding=_ENCODING, newline="") if packed else path.open(encoding=_ENCODING, newline="")
    )


def _rows(lines: TextIO, form: _Format, where: str) -> Iterator[_Row]:
    header = lines.readline()
    if "|" in header:  # sacct --parsable2; --parsable ends lines with one more
        delimiter, quoting = "|", csv.QUOTE_NONE
    else:
        delimiter, quoting = ",", csv.QUOTE_MINIMAL
    try:
        first = next(csv.reader([header], delimiter=delimiter, quoting=quoting), [])  # type: ignore[arg-type]
        columns = [name.strip().lower() for name in first]
        if columns and not columns[-1]:
            columns.pop()
        if len(columns) > _MAX_COLUMNS:
            raise WorkloadError("line 1", f"there are {len(columns)} columns, more than {_MAX_COLUMNS}", where=where)
        if twice := [name for name, times in Counter(columns).items() if times > 1]:
            raise WorkloadError("line 1", f"the column {shown(twice[0])} is named twice", where=where)
        if missing := [name for name in form.columns if name not in columns]:
            problem = f"there is no column {', '.join(missing)}; there are {shown(', '.join(columns))}"
            raise WorkloadError("line 1", problem, where=where)
        reader = csv.reader(lines, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
        for cells in reader:
            if not cells:
                continue
            if len(cells) == len(columns) + 1 and not cells[-1]:
                cells.pop()
            number = reader.line_num + 1
            if len(cells) != len(columns):
                raise WorkloadError(f"line {number}", f"expected {len(columns)} columns, got {len(cells)}", where=where)
            yield _Row(dict(zip(columns, cells, strict=True)), where, number)
    except csv.Error as error:
        raise WorkloadError("", f"is no table of lines and columns: {error}", where=where) from None
