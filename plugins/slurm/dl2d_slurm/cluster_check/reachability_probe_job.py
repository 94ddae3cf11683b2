"""Probe: a small batch job that checks from a compute node that jobs find and reach the daemon.

The job runs ``dl2-run --check-daemon`` and writes what that prints into its own comment. The result is read from the
comment, so it comes back even if the daemon is unreachable.
"""

from __future__ import annotations

import math
import pwd
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from dl2d.core.errors import NotFound, Unavailable
from dl2d.core.resource_manager import ProbeStep
from dl2d_slurm.commands.commands import Commands, failure
from dl2d_slurm.commands.squeue_and_sinfo_records import query_jobs
from dl2d_slurm.jobs.slurm_states import job_state
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.batch_job_of_task import basic_arguments
from dl2d_slurm.submission.sbatch_backend import JobControl

_FIELDS = ("JobID", "State", "NodeList", "exit_code", "Reason", "Comment")
_REPORT = "dl2d probe: "
_STEP = re.compile(r"(ok|WRONG) (\S+) (.*)")
_POLL_SECONDS = 1.0
_MEMORY_MIB = 256
#: Exit status of the job where it cannot write its comment.
_NO_COMMENT = 3
#: Slurm takes comments of up to 1024 characters.
_SCRIPT = f"""#!/bin/sh
runner={{runner}}
if [ -x "$runner" ]; then
  report=$("$runner" --check-daemon 2>&1)
  status=$?
else
  report="WRONG dl2-run $(id -un) cannot run $runner on this node: install dl2d in a folder that all nodes share"
  status=1
fi
report=$(printf '%s' "$report" | tr '\\n' '|' | cut -c1-1000)
scontrol update "jobid=$SLURM_JOB_ID" "comment={_REPORT}$report" || exit {_NO_COMMENT}
exit $status
"""


def probe(
    commands: Commands,
    control: JobControl,
    settings: SlurmSettings,
    runner: str,
    user: str,
    seconds: float,
    *,
    timer: Callable[[], float],
    sleep: Callable[[float], None],
) -> Sequence[ProbeStep]:
    """Submit the job, wait for its end for at most so many seconds, and return its steps; see ``ProbeManager``."""
    deadline = timer() + seconds
    job = _submit(control, settings, runner, user, seconds)
    where = f" to partition {settings.partition}" if settings.partition else ""
    steps = [ProbeStep("probe job", True, f"job {job} was submitted{where}")]
    found: dict[str, str] = {}
    ended = False
    try:
        while not ended and timer() < deadline:
            sleep(_POLL_SECONDS)
            try:
                listed = _look(commands, job)
            except Unavailable:
                continue
            found = listed or found
            ended = not listed or job_state(listed["State"], placed=True)[0].ended
    finally:
        if not ended:
            control.cancel([job])
    if not ended:
        state, node = found.get("State", "not listed"), found.get("NodeList", "")
        why = f"it is {state}" + (f" on {node}" if node else f" ({found.get('Reason', 'slurmctld does not answer')})")
        text = f"job {job} did not end within {seconds:g} s and was cancelled: {why}"
        return [*steps, ProbeStep("node", False, text)]
    return [*steps, *_read(job, found)]


def _submit(control: JobControl, settings: SlurmSettings, runner: str, user: str, seconds: float) -> str:
    owner: tuple[int, int] | None = None
    if user:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise NotFound(f"there is no user {user}") from None
        owner = entry.pw_uid, entry.pw_gid
    chosen = [f"--partition={settings.partition}"] if settings.partition else []
    options = (
        *(*basic_arguments("/", owner), "--cpus-per-task=1", f"--mem={settings.default_memory_mib or _MEMORY_MIB}M"),
        *(f"--time={math.ceil(seconds / 60) + 1}", "--job-name=dl2d-probe", "--output=/dev/null", *chosen),
        *settings.sbatch_options,
    )
    more = {"MUNGE_SOCKET": settings.munge_socket} if settings.munge_socket else None
    answer = control.submit(options, _SCRIPT.format(runner=shlex.quote(runner)), more)
    if answer.status != 0 or not answer.job_id:
        raise failure("submitting a probe job", answer)
    return answer.job_id


def _look(commands: Commands, job: str) -> dict[str, str]:
    """What squeue says of the job; empty if it does not list it any more. Raises ``Unavailable``."""
    answer, listed = query_jobs(commands, _FIELDS, (job,))
    if answer.status != 0 and isinstance(error := failure("squeue of a probe job", answer), Unavailable):
        raise error
    return next((record for record in listed if record["JobID"] == job), {})


def _read(job: str, found: dict[str, str]) -> Iterator[ProbeStep]:
    """The steps that an ended job reported, from its last record."""
    node, comment = found.get("NodeList", ""), found.get("Comment", "")
    if not comment.startswith(_REPORT):
        missing = "scontrol cannot be run on this node, or has no permission to change the job's comment"
        how = f"{found.get('State', 'not listed any more')}, {found.get('Reason', 'MinJobAge is short')}"
        why = missing if found.get("exit_code") == str(_NO_COMMENT << 8) else how
        yield ProbeStep("node", False, f"job {job} on {node or 'no node'} left no report: {why}")
        return
    yield ProbeStep("node", True, f"job {job} ran on {node}")
    for line in comment.removeprefix(_REPORT).split("|"):
        step = _STEP.fullmatch(line.strip())
        if step is not None:
            yield ProbeStep(step[2], step[1] == "ok", step[3])
        elif line.strip():
            yield ProbeStep("dl2-run", False, line.strip())
