"""What is asked of squeue and sinfo, and how their answers are read.

Fields that people write themselves may hold any character, line breaks and our separator included: comments, job
names and an admin's reason, but also types of generic resources (``--gres=gpu:a|b:1``), accounts and container names.
So each field ends with a terminator that is drawn at random for each query: nobody can write text that looks like
another field or a record of its own.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from msgspec.structs import replace

from dl2d.core.cluster import ANCHOR, Node, NodeState, Task, parse_tag
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.command_output_values import count, hosts, limit_seconds, parse_gres, timestamp, value_or_empty
from dl2d_slurm.commands import Answer, Commands
from dl2d_slurm.job_reason_codes import is_node_refused, says_nothing_of_node, site_limit, waiting_reason
from dl2d_slurm.observed_jobs import WATCH_FIELDS, static_job
from dl2d_slurm.partitions import Partition, task_partitions
from dl2d_slurm.sbatch_options import ANCHOR_FIELDS, OWN_OPTIONS_FIELD, REFUSED_FIELDS, AnchorOptions
from dl2d_slurm.settings import SharingRule, SlurmStaticJobRule
from dl2d_slurm.sharing_with_waiting_jobs import (
    WAITING_FIELDS,
    WaitingJob,
    each_task,
    priority,
    sharing_rule,
    waiting_job,
)
from dl2d_slurm.slurm_states import RESERVED, job_state, node_state

#: Names are those of ``squeue --Format`` and ``sinfo --Format``.
JOB_FIELDS = (
    *("JobID", "State", "SubmitTime", "exit_code", "UserName", "NodeList", "tres-alloc", "tres-per-node"),
    *("JobArrayID", "EndTime", "RestartCnt", "Reason", *WAITING_FIELDS, *ANCHOR_FIELDS, "Comment"),
)
OWNER_FIELDS = (
    *("JobID", "JobArrayID", "State", "SubmitTime", "UserID", "GroupID", "UserName", "Account", "Partition", "QOS"),
    *(*REFUSED_FIELDS, OWN_OPTIONS_FIELD, "Name"),
)
NODE_FIELDS = (
    *("NodeList", "StateLong", "CPUsState", "Memory", "AllocMem", "Gres", "GresUsed"),
    *("PartitionName", "Time", "Available", "features_act", "Reason"),
)
#: Makes both commands print times as seconds since 1970.
TIMES_AS_SECONDS: Mapping[str, str] = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
#: For listings; squeue shortens the numbers of an array's tasks that wait to 64 characters unless it is told otherwise.
LISTING_ENVIRONMENT: Mapping[str, str] = {**TIMES_AS_SECONDS, "SLURM_BITSTR_LEN": "4096"}

#: Starts each terminator: squeue reads leading digits as the field's width.
_SEPARATOR = "|"
_EXCLUDED_FIELDS = ("JobID", "Excluded")
#: Generic resources that a job asked for: for each node, for each task, or in all.
_ASKED = (("tres-per-node", "NumNodes"), ("tres-per-task", "NumTasks"), ("tres-per-job", ""))
_TERMINATED = "signal 15"
_ARRAY_TASK = re.compile(r"[0-9]{1,18}_[0-9]{1,18}")
_RESOURCE = re.compile(r"[a-z][a-z0-9_.:/-]{0,63}")


@dataclass(frozen=True, slots=True)
class Jobs:
    """Parsed answer of squeue."""

    jobs: tuple[RmJob, ...]
    #: Node and room of each job that is ending and ran on one node.
    ending: tuple[tuple[str, Resources], ...] = ()
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
    #: Jobs that wait for room, and are no tasks of dl2d.
    waiting: tuple[WaitingJob, ...] = ()
    #: Node and room of each task job that waits for nothing but this room, by handle.
    waiting_tasks: Mapping[str, tuple[str, Resources]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Parsed answer of sinfo."""

    nodes: tuple[Node, ...]
    #: Slurm's own spelling of generic resources, by our lower-case names.
    spelling: Mapping[str, str]
    #: Partitions with their nodes, by name.
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    #: Features that each node has now.
    features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Nodes that take no tasks only because they are reserved.
    reserved: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def watched_fields() -> tuple[str, ...]:
    """What is asked of squeue where jobs of others are watched."""
    return tuple(dict.fromkeys((*JOB_FIELDS, *WATCH_FIELDS, "Name")))


def new_terminator() -> str:
    """A terminator for one query, which nobody can guess; short, since an answer has it once for each field."""
    return secrets.token_hex(6)


def format_option(fields: Sequence[str], terminator: str) -> str:
    """The ``--Format`` option for some fields; ``terminator-`` ends each field but the last of a record."""
    return "--Format=" + "-,".join(f"{name}:{_SEPARATOR}{terminator}" for name in fields)


def excluded_option(terminator: str) -> str:
    """The option that asks for each job's excluded nodes, for which ``--Format`` has no field."""
    return f"--format=%i{_SEPARATOR}{terminator}-%x{_SEPARATOR}{terminator}"


def records(text: str, fields: Sequence[str], terminator: str) -> Iterator[dict[str, str] | str]:
    """Cut an answer into records; text that is none comes as it is, and so does a record without its end."""
    *pieces, remainder = re.split(f"{re.escape(_SEPARATOR + terminator)}(?!-)", text)
    for record in pieces:
        values = record.split(f"{_SEPARATOR}{terminator}-")
        if len(values) == len(fields):
            yield {name: value.strip() for name, value in zip(fields, values, strict=True)}
        elif record.strip():
            yield record.strip()
    if remainder.strip():
        yield remainder.strip()


def query_jobs(commands: Commands, fields: Sequence[str], ids: Iterable[str]) -> tuple[Answer, list[dict[str, str]]]:
    """Ask squeue for fields of some jobs; returns its answer, and the records in it that can be read."""
    terminator = new_terminator()
    answer = commands.run(
        *("squeue", "--noheader", "--all", "--states=all", f"--jobs={','.join(ids)}"),
        format_option(fields, terminator),
        more=TIMES_AS_SECONDS,
    )
    found = records(answer.stdout, fields, terminator)
    return answer, [record for record in found if not isinstance(record, str)]


def parse_jobs(
    text: str,
    terminator: str,
    *,
    fields: Sequence[str] = JOB_FIELDS,
    rules: Sequence[SlurmStaticJobRule] = (),
    sharing: Sequence[SharingRule] = (),
    partition: str = "",
    tasks: Mapping[str, Task] = MappingProxyType({}),
) -> Jobs:
    """Read squeue's answer. What cannot be read is left out and reported in ``unreadable``.

    ``rules`` say which jobs of others are watched; then ``fields`` are ``watched_fields()``. ``sharing`` says to whom
    elastic jobs yield. ``partition`` is that of the settings. ``tasks`` are dl2d's live tasks by handle, or by tag
    where they have no handle yet: they have their tags, whatever their users have made of their comments.
    """
    jobs: list[RmJob] = []
    ending: list[tuple[str, Resources]] = []
    running: list[tuple[str, Resources]] = []
    unknown: list[str] = []
    unreadable: list[str] = []
    options: dict[str, AnchorOptions] = {}
    #: By JobID and JobArrayID: waiting tasks of an array share a JobID.
    waiting: dict[tuple[str, str], WaitingJob] = {}
    held: list[tuple[str, str, str, Resources]] = []
    for record in records(text, fields, terminator):
        if isinstance(record, str) or not record["JobID"].isascii() or not record["JobID"].isdecimal():
            unreadable.append(f"squeue: cannot read {str(record)[:200]!r}")
            continue
        if not record["State"] or not timestamp(record["SubmitTime"]):
            unreadable.append(f"squeue: no state or submit time of job {record['JobID']}: {str(record)[:200]!r}")
            continue
        job, placed = parse_job(record, rules)
        task = tasks.get(job.handle) or tasks.get(job.tag)
        if task is not None and _is_task(job, task, value_or_empty(record["ReqNodes"])):
            job = replace(job, tag=task.tag)
        else:
            task = None
        if not job_state(record["State"], placed=bool(placed))[1]:
            unknown.append(f"squeue: unknown job state {record['State'][:60]!r}, taken as {job.state}")
        if job.state is RmJobState.PENDING and waiting_reason(record["Reason"]) is None:
            taken = "nothing is concluded from it" if site_limit(record["Reason"]) is None else "taken as a limit"
            unknown.append(f"squeue: unknown reason {_first_words(record['Reason'])!r} of jobs that wait; {taken}")
        # While files of an ended job are staged out of a burst buffer, others have its nodes already.
        if job.state is RmJobState.ENDING and len(placed) == 1 and record["State"] != "STAGE_OUT":
            ending.append((job.node, _allocated_or_requested(record)))
        if job.state is RmJobState.RUNNING and len(placed) == 1 and job.tag and record["State"] != "SUSPENDED":
            running.append((job.node, _allocated_or_requested(record)))
        if job.tag and job.state.holds_resources:
            job = replace(job, held=_allocated_or_requested(record))
            if task is not None:
                held.append((job.handle, task.job.id, record["Partition"], job.held))
        if not job.state.ended:
            # Of jobs with a tag, too: an anchor's user may write one into its comment.
            own = AnchorOptions.of(record)
            own = replace(own, partition=task_partitions(own.partition, partition))
            options[job.shown_id] = own
            yields = sharing_rule(own.partition, sharing).yields
            job = replace(job, priority=priority(record), yields=yields)
        jobs.append(job)
        if job.state is RmJobState.PENDING:
            waits = waiting_job(record, _allocated_or_requested(record), job.shown_id)
            if waits is not None:
                waiting[job.handle, record["JobArrayID"]] = waits
    jobs = list(_without_forged_tags(jobs))
    running_tasks = Counter(job.array_id.partition("_")[0] for job in jobs if job.state is RmJobState.RUNNING)
    tagged = {job.handle for job in jobs if parse_tag(job.tag) is not None}
    return Jobs(
        tuple(jobs), tuple(ending), tuple(running), tuple(dict.fromkeys(unknown)), tuple(unreadable), options,
        tuple((anchor, name, room) for handle, anchor, name, room in held if handle in tagged),
        tuple(each for each in each_task(waiting, running_tasks) if each.claim.handle not in tagged),
        {
            job.handle: (node, found.claim.demand)
            for job in jobs
            if job.handle in tagged and job.reason == "Resources"
            and (found := waiting.get((job.handle, job.handle))) is not None
            for node in hosts(found.required)
        },
    )  # fmt: skip


def _first_words(text: str) -> str:
    """What of a reason may be shown to everybody: sentences may name files or other jobs behind it."""
    return " ".join(text.split()[:3])[:60]


def _is_task(job: RmJob, task: Task, required: str) -> bool:
    """Whether a job with the handle of a task, or with the tag of one that has no handle yet, is this task.

    A slurmctld that ended before it had saved its state gives ids again. So a job that was never listed as the task,
    and whose comment says nothing, is the task only if it requires (``--nodelist``) the node that the task was given.
    """
    if task.submitted:
        return job.submitted == task.submitted
    if job.tag:
        return job.tag == task.tag
    return job.submitted >= int(task.asked_at) and required == task.node


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
        node_refused=state is RmJobState.PENDING and is_node_refused(record["Reason"]),
        any_node=state is RmJobState.PENDING and says_nothing_of_node(record["Reason"]),
        static=static_job(record, _allocated_or_requested(record), rules, started) if rules else None,
    )
    return job, placed


def array_id(record: Mapping[str, str]) -> str:
    """Id of a task of a job array for users (``12_3``); empty for other jobs."""
    return record["JobArrayID"] if _ARRAY_TASK.fullmatch(record["JobArrayID"]) else ""


def _allocated_or_requested(record: Mapping[str, str]) -> Resources:
    """Room of a job; generic resources are in ``tres-alloc`` only where the site accounts for them."""
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
            gres[name.removeprefix("gres/")] = number
    mebibytes = count(memory if memory[-1:].isalpha() else f"{memory}M") or 0
    return _resources(cpus, str(mebibytes // 1024**2), gres or _asked(asked))


def _asked(texts: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Generic resources that a job asked for, from pairs of these and how often they were asked for."""
    amounts: dict[str, int] = {}
    for text, number in texts:
        times = count(number) or 1
        for name, amount in parse_gres(value_or_empty(text)).items():
            amounts[name] = amounts.get(name, 0) + amount * times
    return amounts


def with_ending_jobs(nodes: Iterable[Node], jobs: Jobs) -> tuple[Node, ...]:
    """Nodes with the room of ending jobs on one node counted as used.

    While the processes of a job are still being killed sinfo shows its room as free already, though Slurm gives it to
    nobody until they are gone; squeue does not say what a job on several nodes holds on each. A job with a tag that ran
    when squeue was asked, and had begun to end when sinfo was, holds its room, too: what such jobs hold is the least
    that is used.
    """
    ending, running = _by_node(jobs.ending), _by_node(jobs.running)
    return tuple(
        replace(node, used=_used(node, ending.get(node.name, NO_RESOURCES), running.get(node.name, NO_RESOURCES)))
        if node.name in ending or node.name in running
        else node
        for node in nodes
    )


def _by_node(rooms: Iterable[tuple[str, Resources]]) -> dict[str, Resources]:
    sums: dict[str, Resources] = {}
    for name, room in rooms:
        sums[name] = sums.get(name, NO_RESOURCES) + room
    return sums


def _used(node: Node, ending: Resources, running: Resources) -> Resources:
    names = {*node.used.as_dict(), *ending.as_dict(), *running.as_dict()}
    used = {name: max(node.used.get(name), running.get(name)) + ending.get(name) for name in names}
    return Resources.of({name: min(amount, node.capacity.get(name)) for name, amount in used.items()})


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


IDENTITY_FIELDS = ("JobID", "JobArrayID", "SubmitTime", "UserName")


def identities(found: Iterable[Mapping[str, str]]) -> dict[RmIdentity, str]:
    """Ids that scancel takes for one job alone, by the jobs' identities without tags, from records.

    Users may change the tag at any time (``scontrol update comment=``), and the rest of an identity is unique. The last
    task of a job array has the array's own id as its handle: with that, scancel ends all tasks.
    """
    return {
        RmIdentity(record["JobID"], timestamp(record["SubmitTime"]), record["UserName"], ""): (
            array_id(record) or record["JobID"]
        )
        for record in found
    }


def _tag(record: Mapping[str, str]) -> str:
    """The tag of a task in a job's comment. dl2d starts no anchors here, so that none has a tag."""
    comment = value_or_empty(record["Comment"])
    tag = parse_tag(comment)
    return comment if tag is not None and tag[1] != ANCHOR else ""


def parse_nodes(text: str, terminator: str, chosen: Collection[str] = ()) -> Nodes:
    """Read sinfo's answer. A node that is in several partitions is listed several times and counts once.

    ``chosen`` are the partitions whose nodes dl2d sees; all if empty.
    """
    nodes: dict[str, Node] = {}
    partitions: dict[str, tuple[list[str], str, str]] = {}
    features: dict[str, frozenset[str]] = {}
    reserved: set[str] = set()
    unknown: list[str] = []
    unreadable: list[str] = []
    spelling: dict[str, str] = {}
    for record in records(text, NODE_FIELDS, terminator):
        if isinstance(record, str) or not record["NodeList"]:
            unreadable.append(f"sinfo: cannot read {str(record)[:200]!r}")
            continue
        name = record["NodeList"]
        partitions.setdefault(record["PartitionName"], ([], record["Time"], record["Available"]))[0].append(name)
        if name in nodes or (chosen and record["PartitionName"] not in chosen):
            continue
        found = node_state(record["StateLong"])
        if not found.known:
            unknown.append(f"sinfo: unknown node state {record['StateLong'][:60]!r}, nothing is put there")
        if record["StateLong"] in RESERVED:
            reserved.add(name)
        features[name] = frozenset(value_or_empty(record["features_act"]).split(","))
        gres = parse_gres(record["Gres"])
        spelling.update({key.lower(): key for key in gres})
        cpus = record["CPUsState"].split("/")
        if len(cpus) != 4 or count(cpus[3]) is None:
            unreadable.append(f"sinfo: cannot read the CPUs of {name} from {record['CPUsState'][:60]!r}")
            continue
        why = value_or_empty(record["Reason"])
        remark = found.remark
        if why and found.state is not NodeState.UP:
            remark = f"{remark}: {why}" if remark else why
        nodes[name] = Node(
            name=name,
            capacity=_node_room(cpus[3], record["Memory"], record["Gres"]),
            used=_node_room(cpus[0], record["AllocMem"], record["GresUsed"]),
            state=found.state,
            remark=remark,
        )
    found_partitions = {
        name: Partition(name, frozenset(members), limit_seconds(limit), down="" if state == "up" else state)
        for name, (members, limit, state) in partitions.items()
    }
    return Nodes(
        tuple(nodes.values()), spelling, found_partitions, features, frozenset(reserved),
        tuple(dict.fromkeys(unknown)),
        tuple(unreadable),
    )  # fmt: skip


@lru_cache(16_384)
def _node_room(cpus: str, memory: str, gres: str) -> Resources:
    return _resources(cpus, memory, parse_gres(gres))


def _resources(cpus: str, memory: str, gres: Mapping[str, int]) -> Resources:
    amounts: dict[str, float] = {"cpu": count(cpus) or 0, "memory": count(memory.rstrip("+")) or 0}
    for name, amount in gres.items():
        lower = name.lower()
        if _RESOURCE.fullmatch(lower) and lower not in ("cpu", "memory"):
            amounts[lower] = amounts.get(lower, 0) + amount
    return Resources.of({name: min(amount, 1e12) for name, amount in amounts.items()})


def parse_excluded(text: str, terminator: str) -> dict[str, str]:
    """Excluded nodes of each job in squeue's answer to ``excluded_option``."""
    # Tasks of an array that wait share a record: ``12_[3-9]``.
    return {
        record["JobID"].partition("_[")[0]: value_or_empty(record["Excluded"])
        for record in records(text, _EXCLUDED_FIELDS, terminator)
        if not isinstance(record, str)
    }
