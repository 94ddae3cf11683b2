"""Ended jobs that slurmctld has forgotten already: asked of sacct, where the site has accounting."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence

import structlog

from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.resource_manager import RmJob
from dl2d_slurm.commands.commands import MAX_IDS, Commands, configured, failure
from dl2d_slurm.commands.squeue_and_sinfo_records import TIMES_AS_SECONDS
from dl2d_slurm.jobs.squeue_jobs import parse_job
from dl2d_slurm.settings import TASKS, SlurmStaticJobRule

log = structlog.get_logger(__name__)

#: Fields of sacct, each with its name in records: that of the same field of squeue, except ``requested``, which squeue
#: lacks. The last three may hold any text.
_FIELDS = (
    *(("JobIDRaw", "JobID"), ("JobID", "JobArrayID"), ("State", "State"), ("Submit", "SubmitTime")),
    *(("Start", "StartTime"), ("End", "EndTime"), ("ExitCode", "exit_code"), ("User", "UserName"), ("UID", "UserID")),
    *(("GID", "GroupID"), ("Account", "Account"), ("Partition", "Partition"), ("QOS", "QOS")),
    *(("NodeList", "NodeList"), ("NNodes", "NumNodes"), ("NTasks", "NumTasks"), ("AllocTRES", "tres-alloc")),
    *(("ReqTRES", "requested"), ("Timelimit", "TimeLimit")),
    *(("Reason", "Reason"), ("Comment", "Comment"), ("JobName", "Name")),
)
#: Name of a task job of dl2d. sacct shows comments, and so the tags in them, only at sites that store these.
_TASK_NAME = re.compile(r"dl2-.+-(worker|ps)-[0-9]+")
#: States of the jobs that are asked for: without any, sacct leaves out those that were held while they ran, which have
#: no eligible time. The earlier run of a requeued job (RQ) tells nothing of an end.
_STATES = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,RV,S,TO"
_NO_ACCOUNTING = re.compile(r"storage is disabled|sacct is not installed")
#: The clocks of slurmctld and the daemon may differ by this much.
_CLOCK_SECONDS = 10.0
#: Longest and shortest time that one query covers, and the longest time that is made up for.
_MAX_WINDOW, _MIN_WINDOW, _MAX_BEHIND = 86_400.0, 900.0, 30 * 86_400.0
#: After a query that was in vain, how long until the next one, and until that time is given up.
_RETRY_SECONDS, _GIVE_UP_SECONDS = 60.0, 3600.0


class Accounting:
    """Finds ended static jobs with at most one sacct in a listing, and with none while slurmctld still lists them.

    Final states of tasks take one sacct for each ``MAX_IDS`` handles.

    Parameters
    ----------
    commands
        Runs sacct and scontrol.
    rules
        Which jobs are static jobs; without rules none are asked for.
    """

    def __init__(self, commands: Commands, rules: Sequence[SlurmStaticJobRule]) -> None:
        self._commands = commands
        self._rules = rules
        self._partitions = ",".join(sorted({rule.partition for rule in rules}))
        #: Tasks are counted by a job's steps.
        self._steps = any(rule.size == TASKS for rule in rules)
        #: Seconds for which slurmctld lists an ended job; None before it was asked.
        self._listed_seconds: float | None = None
        self._available = True
        self._window = _MAX_WINDOW
        self._retry_at = 0.0
        #: Since when queries have been in vain; None while they are not.
        self._vain_since: float | None = None

    def needed(self, since: float | None, now: float) -> bool:
        """Whether jobs that ended after ``since`` may be forgotten by slurmctld at ``now``."""
        return self._available and bool(self._rules) and since is not None and now - since > self._seconds_listed()

    def ended_jobs(
        self, since: float, now: float, listed: Collection[tuple[str, int]]
    ) -> tuple[tuple[RmJob, ...], float]:
        """Static jobs that ended after ``since`` and are not among ``listed``, and the time until which these are all.

        The second value is ``since`` where sacct does not answer, or says of a job that it runs although slurmctld has
        forgotten it: the same is to be asked again. ``listed``: handle and submit time of each job in squeue's answer,
        which was asked for at ``now``.
        """
        if now < self._retry_at:
            return (), since
        since = max(since, now - _MAX_BEHIND)
        until = min(since + self._window, now)
        try:
            jobs = tuple(self._ask(since, until))
        except ResourceManagerError as error:
            if self._disable_if_missing(error):
                return (), now
            self._window = max(self._window / 2, _MIN_WINDOW)
            return (), self._in_vain(since, until, now, str(error))
        unlisted = [job for job in jobs if job.static is not None and (job.handle, job.submitted) not in listed]
        ended = tuple(job for job in unlisted if job.state.ended)
        if late := [job.handle for job in unlisted if not job.state.ended and job.submitted < int(now)]:
            return ended, self._in_vain(
                since, until, now, f"the end of jobs {', '.join(late[:5])} is not accounted yet"
            )
        self._window = min(self._window * 2, _MAX_WINDOW)
        if until == now:
            self._vain_since = None
        return ended, until

    def final_states(self, handles: Sequence[str]) -> tuple[RmJob, ...]:
        """The jobs with these ids in their last states; of a requeued job, its last run. Empty without accounting.

        The end of one that has not ended here, and that slurmctld has forgotten, has not reached slurmdbd yet.

        Raises
        ------
        ResourceManagerError
            sacct does not answer.
        """
        if not self._available:
            return ()
        jobs: list[RmJob] = []
        for first in range(0, len(handles), MAX_IDS):
            ids = ",".join(handles[first : first + MAX_IDS])
            try:
                # With --jobs and without --starttime, sacct searches all times.
                records, _ = self._query("--allocations", f"--jobs={ids}")
            except ResourceManagerError as error:
                if self._disable_if_missing(error):
                    break
                raise
            jobs += (parse_job(record, ())[0] for record in records)
        return tuple(jobs)

    def _disable_if_missing(self, error: ResourceManagerError) -> bool:
        """Ask sacct no more if an error means that Slurm has no accounting; returns whether it does."""
        if not _NO_ACCOUNTING.search(str(error)):
            return False
        log.warning("Slurm has no accounting: final states of jobs that it no longer lists are not known")
        self._available = False
        return True

    def _in_vain(self, since: float, until: float, now: float, reason: str) -> float:
        if self._vain_since is None:
            self._vain_since = now
            log.warning("sacct does not say yet which jobs ended", since=since, until=until, reason=reason)
        if now - self._vain_since < _GIVE_UP_SECONDS:
            self._retry_at = now + _RETRY_SECONDS
            return since
        log.error(
            "sacct has not said for an hour which jobs ended between since and until: they may be missing from the "
            "records; call sacct on this machine to see why",
            since=since, until=until, reason=reason,
        )  # fmt: skip
        return until

    def _query(self, *selection: str) -> tuple[list[dict[str, str]], dict[str, str]]:
        """Call sacct with options that select jobs; returns what ``_parse`` does."""
        delimiter = f"|{secrets.token_hex(16)}|"
        answer = self._commands.run(
            *("sacct", "--noheader", "--parsable", "--allusers", "--local", *selection),
            *(f"--delimiter={delimiter}", f"--format={','.join(field for field, _ in _FIELDS)}"),
            more=TIMES_AS_SECONDS,
        )
        if answer.status != 0:
            raise failure("sacct failed", answer)
        return _parse(answer.stdout, delimiter)

    def _ask(self, since: float, until: float) -> Iterator[RmJob]:
        records, tasks = self._query(
            *(f"--partition={self._partitions}", f"--state={_STATES}"),
            *(() if self._steps else ("--allocations",)),
            *(f"--starttime={_utc(since - _CLOCK_SECONDS)}", f"--endtime={_utc(until + _CLOCK_SECONDS)}"),
        )
        for record in records:
            if _TASK_NAME.fullmatch(record["Name"]):
                continue
            # A job without an option for its tasks has one on each node.
            count = max(
                int(text) for text in ("0", record["NumNodes"], tasks.get(record["JobID"], "0")) if text.isdecimal()
            )
            record["NumTasks"] = str(count)
            job, _ = parse_job(record, self._rules)
            yield job

    def _seconds_listed(self) -> float:
        if self._listed_seconds is None:
            age = int(configured(self._commands, "MinJobAge"))
            # 0: slurmctld forgets nothing.
            self._listed_seconds = max(age - _CLOCK_SECONDS, 0.0) if age else float("inf")
        return self._listed_seconds


def _parse(text: str, delimiter: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Records of jobs under squeue's names of their fields, and the most tasks that a step of each had, by job id.

    Raises
    ------
    Unavailable
        The answer does not end with a whole record.
    """
    values = text.split(delimiter)
    if values.pop().strip() or len(values) % len(_FIELDS):
        raise Unavailable("sacct's output ended within a record; it is read again in the next tick", said=text[-200:])
    jobs: list[dict[str, str]] = []
    tasks: dict[str, str] = {}
    for start in range(0, len(values), len(_FIELDS)):
        named = zip(_FIELDS, values[start : start + len(_FIELDS)], strict=True)
        record = {name: value.strip() for (_, name), value in named}
        job, step, _ = record["JobID"].partition(".")
        if step:
            tasks[job] = max(tasks.get(job, "0"), record["NumTasks"], key=lambda count: int(count or 0))
        elif job.isascii() and job.isdecimal():
            record["tres-alloc"] = record["tres-alloc"] or record["requested"]
            jobs.append(record)
    return jobs, tasks


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
