"""Admission: checks the request of a job that is submitted, or that registers itself, before anything is kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dl2d.core.errors import RequestError
from dl2d.core.job_request_parser import (
    MAX_FOLDER_BYTES,
    MAX_LAUNCH_BYTES,
    RequestRules,
    parse_request,
    read_directives,
)
from dl2d.core.jobs import NO_LAUNCH, TASK_ROLES, Consistency, Job, JobKey, JobRequest, Launch, Owner, Role, User
from dl2d.core.resource_manager import Anchor, RmListing
from dl2d.core.resources import NO_RESOURCES, Resources, too_small_everywhere
from dl2d.daemon.api.limited_size_dict import NewestEntries
from pslite.job.environment_passed_to_tasks import is_secret

#: Resources of which a fraction is rounded up where the resource manager gives whole numbers only.
_ROUNDED_UP = frozenset({"cpu", "memory"})
#: Refused jobs that are remembered.
_MAX_REFUSED = 1000


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks what a job asks for before anything is kept."""

    rules: RequestRules
    #: ``Capabilities.defaults``. Demands are those of tasks as the resource manager starts them, so that no more are
    #: packed on a node than have room there.
    defaults: Resources = NO_RESOURCES

    def submitted(
        self, key: JobKey, request: Mapping[str, object], launch: Launch, owner: Owner, listing: RmListing
    ) -> Job:
        """A job from ``dl2d submit``.

        Raises
        ------
        RequestError
            A key of the request is unknown, missing or bad, a demand cannot be met, or no node could ever run one of
            its tasks.
        """
        parsed = self._as_given(parse_request(request, rules=self.rules))
        job = Job(key=key, request=parsed, owner=owner, launch=launch)
        self._check(job, listing)
        return job

    def registered(self, anchor: Anchor, launch: Launch, listing: RmListing) -> Job:
        """A job whose anchor the resource manager authenticates; its request is in its options and its batch script.

        Raises
        ------
        RequestError
            As for ``submitted``; names the line of the script.
        """
        directives = {**read_directives(anchor.script), **_options(anchor)}
        if not directives:
            raise RequestError("#DL2", "the batch script has no #DL2 lines: dl2d does not know what this job needs")
        parsed = parse_request({"name": anchor.name, **directives}, rules=self.rules, where=anchor.source)
        request = self._as_given(parsed)
        job = Job(
            key=anchor.key, request=request, owner=anchor.owner, launch=launch, anchor=anchor.handle or anchor.key.id
        )
        self._check(job, listing)
        return job

    def registered_static(self, anchor: Anchor, launch: Launch, listing: RmListing, address: str) -> Job:
        """The same where dl2d does not act: its coordinator, at ``address``, starts the tasks itself.

        Command and environment are not kept.
        """
        job = self.registered(anchor, launch, listing)
        return replace(job, launch=NO_LAUNCH, static=True, address=address or "not told")

    def _as_given(self, request: JobRequest) -> JobRequest:
        if not self.defaults.thousandths:
            return request
        check_whole(request)
        ps = _rounded_up(request.ps, self.defaults) if request.max_ps else request.ps
        return replace(request, worker=_rounded_up(request.worker, self.defaults), ps=ps)

    def _check(self, job: Job, listing: RmListing) -> None:
        request = job.request
        if request.consistency is not Consistency.SYNC:
            raise RequestError("consistency", "this version trains with consistency=sync only")
        check_feasible(request, listing)
        check_launch(job.launch)


def _rounded_up(demand: Resources, defaults: Resources) -> Resources:
    """A demand as the resource manager meets it: devices that are demanded by type (``gpu:a100``) are ``gpu``, too."""
    amounts = {**defaults.as_dict(), **demand.as_dict()}
    rounded = {name: math.ceil(amount) if name in _ROUNDED_UP else amount for name, amount in amounts.items()}
    typed = ((name.partition(":")[0], amount) for name, amount in rounded.items() if ":" in name)
    return Resources.of(rounded).maximum(Resources.total(Resources.of({name: amount}) for name, amount in typed))


def check_whole(request: JobRequest) -> None:
    """Check the demands for a resource manager of whole numbers, which rounds up CPUs and memory only.

    Raises
    ------
    RequestError
        A task demands a fraction of another resource.
    """
    problems = []
    for role in (Role.WORKER, Role.PS) if request.max_ps else (Role.WORKER,):
        for name, amount in request.demand(role).as_dict().items():
            if name not in _ROUNDED_UP and amount != int(amount):
                said = f"{Resources.of({name: amount})} cannot be given, since {name} is given in whole numbers only"
                problems.append((role.value, f"{said}; demand {name}:{math.ceil(amount)}"))
    if problems:
        raise RequestError(*problems[0], others=problems[1:])


def check_options(anchor: Anchor, seen: Mapping[str, str]) -> None:
    """Check that the resource manager has kept the options that the job sees in its environment.

    Raises
    ------
    RequestError
        One of them is not kept, or with another value.
    """
    kept = _options(anchor)
    lost = sorted(key for key, value in seen.items() if kept.get(key) != value)
    if lost:
        raise RequestError(
            lost[0],
            "was given to sbatch, but is not in the job's AdminComment: use #DL2 lines in the batch script, or ask the "
            "administrator to install job_submit.lua (docs/slurm.md)",
        )


def _options(anchor: Anchor) -> dict[str, object]:
    return read_directives(anchor.options, where="options at submission")


def check_feasible(request: JobRequest, listing: RmListing) -> None:
    """Check that an empty node could run a worker, and one a PS.

    Raises
    ------
    RequestError
        None could; names the resource, the demand and what the nearest node has.
    """
    problems = []
    capacities = {node.name: node.capacity for node in listing.nodes}
    for role in TASK_ROLES:
        if (found := too_small_everywhere(request.demand(role), capacities)) is not None:
            nearest, missing = found
            problems.append((role.value, f"no node is large enough for one ({missing} on {nearest})"))
    if problems:
        raise RequestError(*problems[0], others=problems[1:])


def check_launch(launch: Launch) -> None:
    """Check that a command can be started.

    Raises
    ------
    RequestError
        The command is empty, command and environment are too large or hold NUL bytes, or a variable looks like a
        secret.
    """
    if not launch.argv or not launch.argv[0]:
        raise RequestError("command", "is empty")
    texts = [*launch.argv, launch.cwd, *(part for pair in launch.env for part in pair)]
    if any("\0" in text for text in texts):
        raise RequestError("command", "command or environment holds a NUL byte")
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise RequestError("command", "command or environment is not UTF-8") from None
    if size > MAX_LAUNCH_BYTES:
        raise RequestError("command", f"command and environment together are larger than {MAX_LAUNCH_BYTES} bytes")
    secrets = [name for name, value in launch.env if is_secret(name, value)]
    if secrets:
        raise RequestError(
            f"env.{secrets[0]}",
            f"looks like a secret, which dl2d does not keep ({', '.join(secrets)}): let the script read it from a file "
            "that only its user can read",
        )
    if not launch.cwd.startswith("/"):
        raise RequestError("cwd", f"must be an absolute path, got {launch.cwd[:MAX_FOLDER_BYTES]!r}")
    if len(launch.cwd.encode()) > MAX_FOLDER_BYTES:
        raise RequestError("cwd", f"is longer than {MAX_FOLDER_BYTES} bytes, as no path may be")


class RefusedJobs:
    """Why jobs were refused when they registered; in memory, so until the daemon ends. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By job id: its user's id, its name, when it was submitted, and the reason.
        self._refused = NewestEntries[str, tuple[int, str, int, str]](_MAX_REFUSED)

    def note(self, anchor: Anchor, reason: str) -> None:
        """Remember that a job was refused."""
        with self._lock:
            self._refused[anchor.key.id] = anchor.owner.uid, anchor.name, anchor.key.submitted, reason

    def reason(self, job: str, user: User | None, after: int) -> str:
        """Why the job with this id, or the last one with this name, was refused; empty if that is not known.

        ``user`` is who asks, None for an operator: others than its user are told of no job. Only jobs that were
        submitted later than ``after`` (seconds since 1970) count.
        """
        with self._lock:
            seen = [
                (key, name, reason)
                for key, (uid, name, submitted, reason) in reversed(self._refused.items())
                if job in (key, name) and submitted > after and (user is None or user.uid == uid)
            ]
        return next((reason for key, _, reason in seen if key == job), seen[0][2] if seen else "")
