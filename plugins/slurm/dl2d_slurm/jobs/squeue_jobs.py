"""Jobs, and what scaling needs to know of them, from squeue."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from dl2d.core.cluster import ANCHOR, Task, parse_tag
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState
from dl2d.core.resources import Resources
from dl2d_slurm.commands.squeue_and_sinfo_records import TIMES_AS_SECONDS, records
from dl2d_slurm.commands.values_in_command_output import (
    count,
    hosts,
    may_be_unknown,
    name_or_empty,
    node_count,
    parse_gres,
    resources_of,
    timestamp,
    value_or_empty,
)
from dl2d_slurm.jobs.cpus_of_waiting_jobs import RequestedCpus
from dl2d_slurm.jobs.gres_shard_and_mps import with_shares
from dl2d_slurm.jobs.job_reason_codes import is_node_refused, says_nothing_of_node, site_limit, waiting_reason
from dl2d_slurm.jobs.slurm_states import NOT_EXECUTING_STATES, job_state
from dl2d_slurm.jobs.static_jobs import WATCH_FIELDS, static_job
from dl2d_slurm.jobs.waiting_jobs import (
    WAITING_FIELDS,
    WaitingJob,
    each_task,
    priority,
    sharing_rule,
    waiting_job,
    without_memory,
)
from dl2d_slurm.settings import SharingRule, SlurmStaticJobRule
from dl2d_slurm.submission.partitions import task_partitions
from dl2d_slurm.submission.sbatch_options import ANCHOR_FIELDS, OWN_OPTIONS_FIELD, REFUSED_FIELDS, AnchorOptions

#: Names are those of ``squeue --Format``.
JOB_FIELDS = (
    *("JobID", "State", "SubmitTime", "exit_code", "UserName", "NodeList", "tres-alloc", "tres-per-node"),
    *("JobArrayID", "EndTime", "RestartCnt", "Reason", *WAITING_FIELDS, *ANCHOR_FIELDS, "Comment"),
)
OWNER_FIELDS = (
    *("JobID", "JobArrayID", "State", "SubmitTime", "UserID", "GroupID", "UserName", "Account", "Partition", "QOS"),
    *(*REFUSED_FIELDS, OWN_OPTIONS_FIELD, "Licenses", "Name"),
)
IDENTITY_FIELDS = ("JobID", "JobArrayID", "SubmitTime", "UserName")
#: For listings; squeue shortens the numbers of an array's tasks that wait to 64 characters unless it is told otherwise.
LISTING_ENVIRONMENT: Mapping[str, str] = {**TIMES_AS_SECONDS, "SLURM_BITSTR_LEN": "4096"}

#: Generic resources that a job asked for: for each node, for each task, or in all.
_ASKED = (("tres-per-node", "NumNodes"), ("tres-per-task", "NumTasks"), ("tres-per-job", ""))
_TERMINATED = "signal 15"
_ARRAY_TASK = re.compile(r"[0-9]{1,18}_[0-9]{1,18}")

#: The clock of slurmctld may be behind the daemon's by so many seconds.
_CLOCK_SECONDS = 60


class HeldInPartition(NamedTuple):
    """The nodes of a job that holds resources, its partition, its CPUs on each node, and its QOS."""

    partition: str
    nodes: tuple[str, ...]
    cpus: float
    qos: str


@dataclass(frozen=True, slots=True)
class Jobs:
    """Parsed answer of squeue."""

    jobs: tuple[RmJob, ...]
    #: Each node on which a job is ending, and the job's room there: an equal share, where it ran on several nodes.
    ending: tuple[tuple[str, Resources], ...] = ()
    #: The nodes among them of jobs that ran on several, which may hold more there than such a share.
    ending_in_part: frozenset[str] = frozenset()
    #: Those of each job with a tag that runs on one node and is not suspended.
    running: tuple[tuple[str, Resources], ...] = ()
    #: States and reasons that no table has, each once.
    unknown: tuple[str, ...] = ()
    #: Records that could not be read: jobs may be missing.
    unreadable: tuple[str, ...] = ()
    #: Options of each job that has not ended, by the id by which its user knows it; with the partitions that its tasks
    #: would have.
    options: Mapping[str, AnchorOptions] = field(default_factory=dict)
    #: The anchor's id, the partition and what it holds, of each of dl2d's tasks that holds resources.
    tasks: tuple[tuple[str, str, Resources], ...] = ()
    #: Jobs that wait for room on nodes, and such that wait for a limit that others fill. Of dl2d's tasks only those
    #: that were submitted without a node.
    waiting: tuple[WaitingJob, ...] = ()
    waiting_for_limits: tuple[WaitingJob, ...] = ()
    #: What running jobs without dl2d's tasks hold together, and their number, by user and the options that say which
    #: limits hold for them (``limit_scope``).
    others: Mapping[tuple[str, AnchorOptions], tuple[Resources, int]] = field(default_factory=dict)
    #: By handle.
    in_partitions: Mapping[str, HeldInPartition] = field(default_factory=dict)
    #: Node and room of each task job that waits for nothing but this room, by handle.
    waiting_tasks: Mapping[str, tuple[str, Resources]] = field(default_factory=dict)


def watched_fields() -> tuple[str, ...]:
    """What is asked of squeue where there are rules for static jobs (setting ``watch``)."""
    return tuple(dict.fromkeys((*JOB_FIELDS, *WATCH_FIELDS, "Name")))


@dataclass(frozen=True, slots=True)
class _Listed:
    """A record of squeue, and what was made of it."""

    record: Mapping[str, str]
    #: With the tag that its user gave it, if it is none of dl2d's tasks.
    job: RmJob
    #: The nodes that it has or had; of a job that is ending, those where it has not ended yet.
    nodes: tuple[str, ...]
    #: What it holds, or asks for, as limits count it.
    room: Resources
    #: What it holds of its nodes.
    of_nodes: Resources
    #: The task that it is.
    task: Task | None = None
    #: Its options, if it has not ended.
    options: AnchorOptions | None = None

    @property
    def node_count(self) -> int:
        """Number of nodes that it was given."""
        return max(len(self.nodes), node_count(self.record["tres-alloc"]), 1)

    @property
    def still_holds_room(self) -> bool:
        """Whether it is ending and others do not have its room yet, as they do while it stages out files."""
        return self.job.state is RmJobState.ENDING and self.record["State"] != "STAGE_OUT"


def parse_jobs(
    text: str,
    terminator: str,
    *,
    fields: Sequence[str] = JOB_FIELDS,
    rules: Sequence[SlurmStaticJobRule] = (),
    sharing: Sequence[SharingRule] = (),
    partition: str = "",
    tasks: Mapping[str, Task] = MappingProxyType({}),
    capacities: Mapping[str, Resources] = MappingProxyType({}),
    known_users: Mapping[tuple[str, int], str] = MappingProxyType({}),
) -> Jobs:
    """Read squeue's answer. What cannot be read is left out and reported in ``unreadable``.

    ``rules`` say which jobs are static jobs; then ``fields`` are ``watched_fields()``. ``sharing`` says to whom elastic
    jobs yield. ``partition`` is that of the settings. ``tasks`` are dl2d's live tasks by handle, or by tag where they
    have no handle yet: they have their tags, whatever their users have made of their comments. ``capacities`` are those
    of nodes: they say of which type the GPUs are that a job holds. ``known_users`` are those of earlier listings, by
    handle and submit time: they hold for jobs whose users the name service does not know at this moment.
    """
    listed: list[_Listed] = []
    unreadable: list[str] = []
    for record in records(text, fields, terminator):
        if isinstance(record, str) or not record["JobID"].isascii() or not record["JobID"].isdecimal():
            unreadable.append(f"squeue: cannot read {str(record)[:200]!r}")
        elif not record["State"] or not timestamp(record["SubmitTime"]):
            unreadable.append(f"squeue: no state or submit time of job {record['JobID']}: {str(record)[:200]!r}")
        else:
            listed.append(_listed(record, rules, sharing, partition, tasks, capacities))
    listed = _with_known_users(listed, known_users)
    jobs = tuple(_without_forged_tags(each.job for each in listed))
    tagged = {job.handle for job in jobs if parse_tag(job.tag) is not None}
    waiting = _waiting(listed)
    array_tasks = Counter(job.array_id.partition("_")[0] for job in jobs if job.state is RmJobState.RUNNING)
    # Tasks without a node of their own wait as any other job.
    on_nodes = tagged - {each.job.handle for each in listed if each.task is not None and not each.task.node}
    queue = [each for each in each_task(waiting, array_tasks) if each.claim.handle not in on_nodes]
    return Jobs(
        jobs,
        ending=tuple(_ending(listed)),
        ending_in_part=frozenset(
            node for each in listed if each.still_holds_room and each.node_count > 1 for node in each.nodes
        ),
        running=tuple(_running(listed)),
        unknown=tuple(dict.fromkeys(_unknown_words(listed))),
        unreadable=tuple(unreadable),
        options={each.job.shown_id: each.options for each in listed if each.options is not None},
        tasks=tuple(_held_by_tasks(listed, tagged)),
        waiting=tuple(each for each in queue if not each.limit_reason),
        waiting_for_limits=tuple(each for each in queue if each.limit_reason),
        others=_held_by_others(listed, tagged),
        in_partitions={
            each.job.handle: HeldInPartition(
                each.record["Partition"],
                each.nodes,
                each.of_nodes.get("cpu") / each.node_count,
                name_or_empty(each.record["QOS"]),
            )
            for each in listed
            if each.nodes and (each.still_holds_room or each.job.state is RmJobState.RUNNING)
        },
        waiting_tasks=dict(_tasks_that_wait_for_room(jobs, tagged, waiting)),
    )


def _listed(
    record: Mapping[str, str],
    rules: Sequence[SlurmStaticJobRule],
    sharing: Sequence[SharingRule],
    partition: str,
    tasks: Mapping[str, Task],
    capacities: Mapping[str, Resources],
) -> _Listed:
    job, placed = parse_job(record, rules)
    room = _allocated_or_requested(record)
    of_nodes = room
    if len(placed) == 1 and job.node in capacities:
        room = _with_types(room, capacities[job.node])
        of_nodes = with_shares(room, capacities[job.node])
    task = tasks.get(job.handle) or tasks.get(job.tag)
    if task is not None and _is_task(job, task, value_or_empty(record["ReqNodes"]), tasks):
        job = replace(job, tag=task.tag)
    else:
        task = None
    # What has no tag may be an anchor.
    if job.begins_later or (job.state.holds_resources and (job.tag or len(placed) == 1)):
        job = replace(job, held=of_nodes)
    options = None
    if not job.state.ended:
        # Of jobs with a tag, too: an anchor's user may write one into its comment.
        own = AnchorOptions.of(record)
        options = replace(own, partition=task_partitions(own.partition, partition))
        yields = sharing_rule(options.partition, sharing).yields
        job = replace(job, priority=priority(record), yields=yields)
    return _Listed(record, job, placed, room, of_nodes, task, options)


def _with_known_users(listed: Sequence[_Listed], known: Mapping[tuple[str, int], str]) -> list[_Listed]:
    """The jobs; those of users whom the name service does not know have the user of earlier listings.

    Tasks that were never listed have that of their anchor.
    """

    def with_user(each: _Listed, user: str) -> _Listed:
        return dataclasses.replace(each, job=replace(each.job, user=user))

    if not any(may_be_unknown(each.job.user) for each in listed):
        return list(listed)
    found = [
        with_user(each, known.get((each.job.handle, each.job.submitted), each.job.user))
        if may_be_unknown(each.job.user)
        else each
        for each in listed
    ]
    users = {each.job.shown_id: each.job.user for each in found}
    return [
        with_user(each, users.get(each.task.job.id, each.job.user))
        if each.task is not None and may_be_unknown(each.job.user)
        else each
        for each in found
    ]


def _ending(listed: Iterable[_Listed]) -> Iterator[tuple[str, Resources]]:
    """``Jobs.ending``."""
    for each in listed:
        if each.still_holds_room:
            share = each.of_nodes.share(each.node_count)
            yield from ((node, share) for node in each.nodes)


def _running(listed: Iterable[_Listed]) -> Iterator[tuple[str, Resources]]:
    """``Jobs.running``."""
    for each in listed:
        runs = each.job.state is RmJobState.RUNNING and each.record["State"] != "SUSPENDED"
        if runs and len(each.nodes) == 1 and each.job.tag:
            yield each.job.node, each.of_nodes


def _unknown_words(listed: Iterable[_Listed]) -> Iterator[str]:
    """``Jobs.unknown``."""
    if any(may_be_unknown(each.job.user) for each in listed):
        yield "squeue: there are jobs of users whom this machine's name service does not know"
    for each in listed:
        job, state, reason = each.job, each.record["State"], each.record["Reason"]
        if not job_state(state, placed=bool(each.nodes))[1]:
            yield f"squeue: unknown job state {state[:60]!r}, taken as {job.state}"
        if job.state is RmJobState.PENDING and waiting_reason(reason) is None:
            taken = "nothing is concluded from it" if site_limit(reason) is None else "taken as a limit"
            # Everybody may read this: sentences may name files or other jobs behind the first words.
            words = " ".join(reason.split()[:3])[:60]
            yield f"squeue: unknown reason {words!r} of jobs that wait; {taken}"


def _held_by_tasks(listed: Iterable[_Listed], tagged: Collection[str]) -> Iterator[tuple[str, str, Resources]]:
    """``Jobs.tasks``."""
    for each in listed:
        if each.task is not None and each.job.state.holds_resources and each.job.handle in tagged:
            yield each.task.job.id, each.record["Partition"], each.room


def limit_scope(options: AnchorOptions) -> AnchorOptions:
    """The options of a job that say, with its user, which limits of associations and QOS hold for it."""
    return AnchorOptions(partition=options.partition, account=options.account, qos=options.qos)


def _held_by_others(
    listed: Iterable[_Listed], tagged: Collection[str]
) -> dict[tuple[str, AnchorOptions], tuple[Resources, int]]:
    """``Jobs.others``. A job that is ending does not count in limits any more."""
    held: dict[tuple[str, str, str, str], list[Resources]] = defaultdict(list)
    for each in listed:
        record, job = each.record, each.job
        if job.state is RmJobState.RUNNING and not (each.task is not None and job.handle in tagged):
            scope = job.user, record["Partition"], record["Account"], record["QOS"]
            held[scope].append(each.room)
    return {
        (user, AnchorOptions(partition=partition, account=name_or_empty(account), qos=name_or_empty(qos))): (
            Resources.total(rooms),
            len(rooms),
        )
        for (user, partition, account, qos), rooms in held.items()
    }


def _waiting(listed: Iterable[_Listed]) -> dict[tuple[str, str], WaitingJob]:
    """Jobs that wait for room, by JobID and JobArrayID: waiting tasks of an array share a JobID.

    Where Slurm does not count memory (``SelectTypeParameters=CR_Core``), jobs that run hold none in ``tres-alloc``, and
    what a job asks for does not keep it from starting.
    """
    listed = list(listed)
    running = [each.record["tres-alloc"] for each in listed if each.job.state is RmJobState.RUNNING]
    memory_counts = not running or any("mem=" in allocated for allocated in running)
    waiting: dict[tuple[str, str], WaitingJob] = {}
    for each in listed:
        if each.job.state is RmJobState.PENDING:
            found = waiting_job(each.record, each.room, each.job.shown_id, is_task=each.task is not None)
            if found is not None and not memory_counts and not found.limit_reason:
                found = dataclasses.replace(found, claim=replace(found.claim, demand=without_memory(each.room)))
            if found is not None:
                waiting[each.job.handle, each.record["JobArrayID"]] = found
    return waiting


def _tasks_that_wait_for_room(
    jobs: Iterable[RmJob], tagged: Collection[str], waiting: Mapping[tuple[str, str], WaitingJob]
) -> Iterator[tuple[str, tuple[str, Resources]]]:
    """``Jobs.waiting_tasks``."""
    for job in jobs:
        found = waiting.get((job.handle, job.handle))
        if job.handle in tagged and job.reason == "Resources" and found is not None:
            yield from ((job.handle, (node, found.claim.demand)) for node in hosts(found.required))


def _is_task(job: RmJob, task: Task, required: str, tasks: Collection[str]) -> bool:
    """Whether a job with the handle of a task, or with the tag of one that has no handle yet, is this task.

    A slurmctld that ended before it had saved its state gives ids again. So a job that was never listed as the task,
    and has another comment, is the task only if it requires (``--nodelist``) the node that the task was given, and has
    not the tag of a task without a handle, which is in ``tasks``. A task without a node is not found then. The clock of
    slurmctld, by which jobs are submitted, may be behind the daemon's.
    """
    if task.submitted:
        return job.submitted == task.submitted
    if job.tag == task.tag:
        return True
    of_node = bool(task.node) and required == task.node
    return job.tag not in tasks and job.submitted >= int(task.asked_at) - _CLOCK_SECONDS and of_node


def parse_job(record: Mapping[str, str], rules: Sequence[SlurmStaticJobRule]) -> tuple[RmJob, tuple[str, ...]]:
    """The job of one record, and the nodes that it has or had."""
    placed = hosts(value_or_empty(record["NodeList"]))
    state, _ = job_state(record["State"], placed=bool(placed))
    if state is RmJobState.FAILED and _exit(record["exit_code"]) == _TERMINATED:
        # Ended by SIGTERM: cancelled by dl2d, the user or an administrator.
        state = RmJobState.CANCELLED
    # Slurm gives a waiting job the start time that it plans, and one that was cancelled before it started a false one.
    started = timestamp(record["StartTime"]) if rules and placed and state is not RmJobState.PENDING else 0
    job = RmJob(
        handle=record["JobID"],
        state=state,
        tag=_tag(record),
        user=record["UserName"],
        node=placed[0] if placed else "",
        reason=_reason(record, state),
        submitted=timestamp(record["SubmitTime"]),
        requeues=count(record.get("RestartCnt", "")) or 0,
        ended=float(timestamp(record["EndTime"])) if state.ended else 0.0,
        time_limit_at=float(timestamp(record["EndTime"])) if state is RmJobState.RUNNING else 0.0,
        array_id=array_id(record),
        not_executing=record["State"] in NOT_EXECUTING_STATES,
        node_refused=state is RmJobState.PENDING and is_node_refused(record["Reason"]),
        any_node=state is RmJobState.PENDING and says_nothing_of_node(record["Reason"]),
        begins_later=state is RmJobState.PENDING and record["Reason"] == "BeginTime",
        static=static_job(record, _allocated_or_requested(record), rules, started) if rules else None,
    )
    return job, placed


def array_id(record: Mapping[str, str]) -> str:
    """Id of a task of a job array for users (``12_3``); empty for other jobs."""
    return record["JobArrayID"] if _ARRAY_TASK.fullmatch(record["JobArrayID"]) else ""


def _allocated_or_requested(record: Mapping[str, str]) -> Resources:
    """Room of a job; generic resources and their types are in ``tres-alloc`` only where the site accounts for them."""
    if record["State"] == "PENDING" and value_or_empty(record.get("tres-per-node", "")):
        record = {**record, "NumNodes": str(RequestedCpus.of(record).nodes)}
    return _room(
        record["tres-alloc"], *((record.get(asked, ""), record.get(counted, "1")) for asked, counted in _ASKED)
    )


# Most jobs of a listing hold the same as others.
@lru_cache(16_384)
def _room(allocated: str, *asked: tuple[str, str]) -> Resources:
    cpus, memory = "0", "0"
    gres: dict[str, int] = {}
    for entry in allocated.split(","):
        name, _, amount = entry.partition("=")
        if name == "cpu":
            cpus = amount
        elif name == "mem":
            memory = amount
        elif name.startswith("gres/") and (number := count(amount)) is not None:
            gres[name.removeprefix("gres/").lower()] = number
    # Kinds of resources come before their types, of which there are no more.
    for name, asked_for in _asked(asked).items():
        gres.setdefault(name, min(asked_for, gres.get(name.partition(":")[0], asked_for)))
    mebibytes = count(memory if memory[-1:].isalpha() else f"{memory}M") or 0
    return resources_of(cpus, str(mebibytes // 1024**2), gres)


@lru_cache(16_384)
def _with_types(room: Resources, capacity: Resources) -> Resources:
    """What a job holds of a node: devices of which the node has one type only are of this type."""
    of_node = capacity.as_dict()
    kinds = {name: name.partition(":")[0] for name in of_node if ":" in name}
    only = {name: room.get(kind) for name, kind in kinds.items() if of_node.get(kind) == of_node[name]}
    return room.maximum(Resources.of(only))


def _asked(texts: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Generic resources that a job asked for, from pairs of these and how often they were asked for.

    What it asked for in several ways, such as ``--gpus-per-task=1 --gpus=2``, it gets once; types of a kind add up.
    """
    most: dict[str, int] = {}
    for text, number in texts:
        times = count(number) or 1
        # A licence, which a job may ask for with each task, has a slash in its name.
        amounts = {
            name.lower(): amount * times for name, amount in parse_gres(value_or_empty(text)).items() if "/" not in name
        }
        for name, amount in amounts.items():
            if ":" in name:
                kind = name.partition(":")[0]
                amounts[kind] -= amount
        for name, amount in amounts.items():
            most[name] = max(most.get(name, 0), amount)
    for name, amount in list(most.items()):
        if ":" in name:
            most[name.partition(":")[0]] += amount
    return most


def _without_forged_tags(jobs: Iterable[RmJob]) -> Iterator[RmJob]:
    """The jobs; anyone may write any comment on their own job, so a tag counts only on jobs of the anchor's owner."""
    jobs = tuple(jobs)
    users = {job.shown_id: job.user for job in jobs}
    for job in jobs:
        tag = parse_tag(job.tag)
        forged = tag is not None and users.get(tag[0].id, job.user) != job.user
        yield replace(job, tag="") if forged else job


def _reason(record: Mapping[str, str], state: RmJobState) -> str:
    reason = value_or_empty(record["Reason"])
    if record["State"] in NOT_EXECUTING_STATES:
        is_suspended = record["State"] in ("SUSPENDED", "STOPPED")
        return "suspended by Slurm" if is_suspended else "its node is being prepared"
    if not state.ended:
        return reason
    if state is RmJobState.DONE:
        return ""
    said = record["State"] if not reason else f"{record['State']} ({reason})"
    how = _exit(record["exit_code"])
    return f"{said}, {how}" if how else said


def _exit(code: str) -> str:
    """How a batch script ended, from a wait status (``768``) or ``status:signal``; "" where there is nothing to say."""
    status, colon, number = code.partition(":")
    try:
        if colon:
            ended, by_signal = int(status), int(number)
        else:
            plain = os.waitstatus_to_exitcode(int(status))
            ended, by_signal = max(plain, 0), max(-plain, 0)
    except (ValueError, OverflowError):
        return ""
    if by_signal:
        return f"signal {by_signal}"
    return f"exit status {ended}" if ended else ""


def identities(found: Iterable[Mapping[str, str]], asked: Iterable[RmIdentity] = ()) -> dict[RmIdentity, str]:
    """Ids that scancel takes for one job alone, by the jobs' identities without tags, from records.

    Users may change the tag at any time (``scontrol update comment=``), and the rest of an identity is unique. The last
    task of a job array has the array's own id as its handle: with that, scancel ends all tasks. Where the name service
    does not know a job's user, it has that of the job ``asked`` for with its id and submit time.
    """
    users = {(job.handle, job.submitted): job.user for job in asked}
    ids = {}
    for record in found:
        handle, submitted, user = record["JobID"], timestamp(record["SubmitTime"]), record["UserName"]
        if may_be_unknown(user):
            user = users.get((handle, submitted), user)
        ids[RmIdentity(handle, submitted, user, "")] = array_id(record) or handle
    return ids


def _tag(record: Mapping[str, str]) -> str:
    """The tag of a task in a job's comment. dl2d submits neither anchors nor job arrays, so that these have no tag."""
    comment = value_or_empty(record["Comment"])
    tag = parse_tag(comment)
    return comment if tag is not None and tag[1] != ANCHOR and "_" not in record["JobArrayID"] else ""
