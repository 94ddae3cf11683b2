"""The Slurm resource manager: elastic jobs as an anchor batch job of the user plus one batch job per task."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import structlog
from msgspec import structs

from dl2d.core.cluster import Node, Task, parse_tag
from dl2d.core.errors import NeverStarts, NodeRefused, Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import (
    Anchor,
    CallStatistics,
    Capabilities,
    EligibleNodes,
    ProbeStep,
    ResourceManager,
    RmIdentity,
    RmJob,
    RmJobState,
    RmListing,
    StartAllowance,
    TaskSpec,
)
from dl2d.core.resources import Resources
from dl2d_slurm.cluster_check.reachability_probe_job import probe
from dl2d_slurm.commands.commands import (
    Commands,
    TokenBucket,
    command_environment,
    configured,
    failure,
    installed_version,
)
from dl2d_slurm.commands.rpc_rate import RpcRate
from dl2d_slurm.commands.squeue_and_sinfo_records import ALL_LOCAL, format_option, new_terminator
from dl2d_slurm.commands.values_in_command_output import may_be_unknown
from dl2d_slurm.jobs.allocation_beyond_demand import AllocationRules, GivenToTask, KnownAllocationRules
from dl2d_slurm.jobs.device_types import DeviceTypes
from dl2d_slurm.jobs.ended_jobs_from_accounting import Accounting
from dl2d_slurm.jobs.job_reason_codes import waits_for_room
from dl2d_slurm.jobs.requeue_anchor import requeue
from dl2d_slurm.jobs.squeue_jobs import JOB_FIELDS, LISTING_ENVIRONMENT, Jobs, parse_jobs, watched_fields
from dl2d_slurm.jobs.stopping import Stopper
from dl2d_slurm.jobs.waiting_jobs import (
    WaitingJob,
    claims,
    drained_claims,
    handle_for_users,
    highest_priority,
    share_limits,
    standing_claims,
    with_given,
    with_tasks_behind_claims,
)
from dl2d_slurm.limits.association_limits import AssociationLimits
from dl2d_slurm.limits.limits_from_reason_codes import never_starts, with_limits
from dl2d_slurm.munge_authentication import USER_SECONDS, authenticate_anchor, proven_uid
from dl2d_slurm.nodes.eligible_nodes import Eligibility
from dl2d_slurm.nodes.excluded_nodes import AnswerValidity, ExcludedNodes
from dl2d_slurm.nodes.free_room_that_slurm_withholds import WithheldRoom
from dl2d_slurm.nodes.max_cpus_per_node import MaxCpusPerNode
from dl2d_slurm.nodes.reservations import KnownReservations, reservation_claims, with_reserved, without_magnetic
from dl2d_slurm.nodes.sinfo_nodes import NODE_FIELDS, Nodes, parse_nodes, with_ending_jobs
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.batch_job_of_task import NODE_REFUSED, batch_script, check_fits, sbatch_arguments
from dl2d_slurm.submission.partitions import (
    Partition,
    partitions_of,
    partitions_that_allow,
    task_partitions,
    task_time_limits,
)
from dl2d_slurm.submission.sbatch_options import (
    NO_OPTIONS,
    AnchorOptions,
    site_options,
    threads_of_core,
    time_limit_minutes,
)
from dl2d_slurm.submission.submission_backends import PARALLEL_SUBMITS, job_control

log = structlog.get_logger(__name__)

_MAX_REPORTED = 1000
#: Maximum number of states and reasons without a meaning that a listing names.
_MAX_REMARKS = 5
#: Shown for a waiting job that has no reason.
_NOT_CONSIDERED = "it was not considered yet"


def create(settings: Mapping[str, object], *, clock: Callable[[], float]) -> ResourceManager:
    """Build the manager from ``resource_manager.slurm`` of the config file. Asks nothing of Slurm yet.

    Raises
    ------
    ConfigError
        A setting is unknown or bad; names the key.
    """
    return SlurmManager(SlurmSettings.parse(settings), clock=clock)


class SlurmManager:
    """Slurm through its commands, slurmrestd or pyslurm; implements ``dl2d.core.resource_manager.ResourceManager``.

    No state has to survive a restart: tasks are found by handle or tag; deadlines of stops, caches and back-offs are in
    memory. A thread cancels jobs at their deadlines until ``close``.

    Parameters
    ----------
    settings
        Checked settings.
    clock
        Seconds since 1970.
    timer
        Seconds on a monotonic clock, by which the deadlines of jobs that are to end are kept.
    sleep
        Waits for some seconds, where more is submitted than ``submit_rate_per_second`` allows.
    environ
        The daemon's environment, of which commands get PATH and SLURM_CONF.
    uid
        User id of the daemon.
    """

    def __init__(
        self,
        settings: SlurmSettings,
        *,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        environ: Mapping[str, str] | None = None,
        uid: int | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._uid = os.geteuid() if uid is None else uid
        given = os.environ if environ is None else environ
        environment = command_environment(settings.slurm_conf, given)
        self._timer, self._sleep = timer, sleep
        self._rate = RpcRate(settings.rpcs_per_minute, timer)
        self._commands = Commands(environment, settings.command_timeout_seconds, self._rate)
        self._control = job_control(
            settings, self._commands, self._rate, environment=environment, uid=self._uid, timer=timer
        )
        self._stopper = Stopper(self._commands, self._control, timer)
        self._accounting = Accounting(self._commands, settings.watch)
        self._limits = AssociationLimits(self._commands)
        self._withheld_room = WithheldRoom(timer)
        self._submit_rate = TokenBucket(settings.submit_rate_per_second, clock=clock, sleep=sleep)
        #: Live tasks of the store in the last call of ``listing``, by handle, or by tag where they have none yet.
        self._tasks: Mapping[str, Task] = {}
        self._spelling: Mapping[str, str] = {}
        self._capacities: Mapping[str, Resources] = {}
        #: Options of each job that had not ended in the last listing, by the id that users know.
        self._options_by_job: Mapping[str, AnchorOptions] = {}
        #: Users of its jobs whom the name service knew then or before, by handle and submit time.
        self._known_users: Mapping[tuple[str, int], str] = {}
        #: Whether a part of that listing could not be read, so that there may be others.
        self._options_missing = False
        self._partitions: Mapping[str, Partition] = {}
        #: Of jobs with tasks, and of waiting jobs.
        self._excluded = ExcludedNodes(self._commands)
        self._device_types = DeviceTypes(self._commands)
        self._site_options = site_options(settings.sbatch_options)
        self._site_threads = threads_of_core(settings.sbatch_options)
        #: Maximum time limit of task jobs by the settings.
        minutes = time_limit_minutes(settings.time_limit) if settings.time_limit else None
        self._max_task_seconds = math.inf if minutes is None else 60.0 * minutes
        #: That of the tasks of each job that had not ended in the last listing, which Slurm's limits may make smaller,
        #: by the id that users know.
        self._max_seconds_by_job: Mapping[str, float] = {}
        self._reservations = KnownReservations(self._commands)
        #: Names of the magnetic ones in the last listing.
        self._magnetic: frozenset[str] = frozenset()
        self._allocation_rules = KnownAllocationRules(self._commands)
        self._last: RmListing | None = None
        #: Replaced whenever a task was submitted or a job registered: a listing that was read meanwhile may lack it and
        #: is not used again.
        self._last_change = object()
        #: Logs a remark unless it is one of the last ``_MAX_REPORTED`` different ones.
        self._report_once = lru_cache(_MAX_REPORTED)(_report)
        self._cluster = settings.cluster

    def capabilities(self) -> Capabilities:
        """See ``ResourceManager``. Checks that the backend can be used, too."""
        self._control.check()
        return Capabilities(
            name="slurm",
            cluster=self._cluster_name(),
            version=installed_version(self._commands),
            starts_anchors=False,
            other_users=self._uid in self._control.privileged(),
            parallel_submits=PARALLEL_SUBMITS,
            parallel_authentication=True,
            output="{cwd}/dl2-{id}/{name}.out",
            queues_tasks=True,
            defaults=Resources.of(cpu=1, memory=self._settings.default_memory_mib),
        )

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        """See ``ResourceManager``. docs/slurm.md has the table of what is asked of Slurm, and when."""
        if tasks is not None:
            # If slurmctld has used an id again, it is that of the later task.
            in_order = sorted(tasks, key=lambda task: task.asked_at)
            before, self._tasks = self._tasks, {task.handle or task.tag: task for task in in_order}
            self._last = self._last if self._tasks.keys() == before.keys() else None
        if self._stopper.cancel_due():
            self._last = None
        now = self._clock()
        ask_accounting = self._accounting.needed(ended_since, now)
        if (
            not ask_accounting
            and self._last is not None
            and 0 <= now - self._last.at < self._settings.poll_floor_seconds
        ):
            return self._last
        with self._rate.listing():
            return self._new_listing(now, ended_since if ask_accounting else None)

    def _new_listing(self, now: float, ended_since: float | None) -> RmListing:
        """Ask Slurm; of accounting the jobs that ended after ``ended_since``, if that is given."""
        last_change = self._last_change
        jobs, nodes = self._ask_jobs_and_nodes()
        waiting = highest_priority(jobs.waiting)
        jobs = replace(
            jobs,
            jobs=self._device_types.with_types(jobs.jobs, waiting, self._capacities, now),
            waiting_for_limits=tuple(highest_priority(jobs.waiting_for_limits)),
        )
        self._ask_excluded_of_listed(jobs, waiting)
        ended: tuple[RmJob, ...] = ()
        ended_until = now
        if ended_since is not None:
            listed = {(job.handle, job.submitted) for job in jobs.jobs}
            ended, ended_until = self._accounting.ended_jobs(ended_since, now, listed)
        # The anchor of a job that is ending may still be given tasks, until its coordinator counts as silent.
        running = [job for job in jobs.jobs if job.state.holds_resources]
        reservations = self._reservations.at(now, self._capacities) if running or waiting else ()
        self._magnetic = frozenset(each.name for each in reservations if each.magnetic)
        anchors = {job.handle: self._options_of(job.shown_id) for job in running}
        resources = {name for capacity in set(self._capacities.values()) for name in capacity.as_dict()}
        limits = tuple(self._limits.growth_limits(jobs, resources, now)) if anchors else ()
        most = {
            job.shown_id: min(self._max_task_seconds, self._limits.max_seconds(job.user, anchors[job.handle]))
            for job in running
        }
        self._max_seconds_by_job = {**self._max_seconds_by_job, **most} if jobs.unreadable else most
        eligibility = Eligibility(self._capacities, nodes.partitions, nodes.features, reservations, now)
        eligible = {job.handle: eligibility.of(anchors[job.handle], most[job.shown_id], job.user) for job in running}
        rules = self._allocation_rules.at(now, ask=bool(anchors))
        sharing = self._settings.sharing
        seen_nodes = with_ending_jobs(with_reserved(nodes, reservations, anchors.values(), now), jobs)
        waiting_static = self._nodes_of_waiting_static_jobs(jobs, eligibility, rules, seen_nodes)
        seen_jobs = self._withheld_room.with_refused_tasks(
            with_limits(jobs.jobs, jobs.options, resources, self._limits.bounds), jobs.waiting_tasks,
            [node for node in seen_nodes if node.name not in jobs.ending_in_part],
        )  # fmt: skip
        partitions = {
            job.handle: jobs.options[job.shown_id].partition for job in jobs.jobs if job.shown_id in jobs.options
        }
        held = [(partition, room) for _, partition, room in jobs.tasks]
        held_in_partitions = [(each.partition, each.qos, each.nodes) for each in jobs.in_partitions.values()]
        max_cpus = MaxCpusPerNode(rules, nodes.partitions, jobs.in_partitions)
        of_waiting = tuple(
            claims(
                with_given(map(self._with_excluded, waiting), eligibility.of, self._capacities, rules),
                eligibility.of, self._capacities, max_cpus.of,
            )
        )  # fmt: skip
        limited = frozenset[str]().union(*(limit.waiting for limit in limits))
        unknown = jobs.unknown + nodes.unknown
        listing = RmListing(
            now,
            max_cpus.nodes(seen_nodes),
            (*max_cpus.jobs(with_tasks_behind_claims(seen_jobs, self._tasks, of_waiting)), *ended),
            ended_until,
            jobs.unreadable + nodes.unreadable,
            growth_limits=(
                *share_limits(nodes.nodes, partitions, held, nodes.partitions, sharing),
                *limits,
            ),
            claims=(
                *of_waiting,
                *reservation_claims(
                    reservations, {job.handle: (job.user, anchors[job.handle]) for job in running}, now
                ),
                *drained_claims(nodes.drained & {task.node for task in self._tasks.values()}),
                *standing_claims(nodes.partitions, sharing, nodes.asleep),
            ),
            limit_claims=tuple(
                structs.replace(job.claim, handle=handle)
                for job in with_given(
                    jobs.waiting_for_limits, eligibility.of, self._capacities, rules, whole_tasks=False
                )
                if (handle := handle_for_users(job)) in limited
            ),
            whole_nodes=frozenset(
                handle for handle, options in anchors.items() if rules.gives_whole_nodes(options.partition)
            ),
            given=self._given(rules, max_cpus, anchors, eligible, nodes.partitions),
            may_preempt=rules.preemption.may_preempt(anchors, eligible, held_in_partitions),
            eligible_nodes={
                handle: found for handle, found in {**dict(waiting_static), **eligible}.items() if found is not None
            },
            remarks=(*(self._limits.outdated(now) if anchors else ()), *unknown[:_MAX_REMARKS]),
        )
        self._last = listing if last_change is self._last_change else None
        return listing

    def _nodes_of_waiting_static_jobs(
        self, jobs: Jobs, eligibility: Eligibility, rules: AllocationRules, nodes: Iterable[Node]
    ) -> Iterator[tuple[str, EligibleNodes | None]]:
        """By handle, the nodes that each waiting static job may use; no node if it waits for anything but room."""
        empty = frozenset(node.name for node in nodes if not node.used.thousandths)
        whole = {job.claim.handle for job in jobs.waiting if job.claim.whole}
        for job in jobs.jobs:
            if job.static is None or job.state is not RmJobState.PENDING:
                continue
            if not waits_for_room(job.reason):
                reason = job.reason or _NOT_CONSIDERED
                yield job.handle, EligibleNodes(frozenset(), f"Slurm does not start it now: {reason}")
                continue
            # For a waiting job this is the end that Slurm has planned, which is no limit.
            options = structs.replace(jobs.options[job.shown_id], ends=0)
            if excluded := self._excluded.of(job.shown_id):
                options = structs.replace(options, exclude=excluded)
            found = eligibility.of(options, job.static.limit, job.user)
            if job.handle in whole or rules.gives_whole_nodes(options.partition):
                alone = "only nodes on which nothing runs"
                found = (
                    EligibleNodes(empty, alone) if found is None
                    else EligibleNodes(empty & found.nodes, f"{found.reason}; {alone}")
                )  # fmt: skip
            yield job.handle, found

    def _given(
        self,
        rules: AllocationRules,
        max_cpus: MaxCpusPerNode,
        anchors: Mapping[str, AnchorOptions],
        eligible: Mapping[str, EligibleNodes | None],
        partitions: Mapping[str, Partition],
    ) -> dict[str, GivenToTask]:
        """``RmListing.given``. Jobs with the same partitions and nodes share one answer.

        Nothing is known where an option for all task jobs says how much memory they get.
        """
        if any(option.startswith("--mem-per-") for option in self._settings.sbatch_options):
            return {}
        found: dict[tuple[str, int], GivenToTask | None] = {}
        of_anchors: dict[str, GivenToTask] = {}
        for handle, options in anchors.items():
            names, usable = options.partition, eligible[handle]
            key = names, id(usable)
            if key not in found:
                known = (partitions[name].nodes for name in names.split(",") if name in partitions)
                nodes = frozenset[str]().union(*known) if usable is None else usable.nodes
                found[key] = rules.given(
                    names, nodes, self._settings.default_memory_mib, self._site_threads,
                    max_cpus.resource_of(names),
                )  # fmt: skip
            if (given := found[key]) is not None:
                of_anchors[handle] = given
        return of_anchors

    def _ask_jobs_and_nodes(self) -> tuple[Jobs, Nodes]:
        """Ask squeue and sinfo, and note what starts, stops and later listings need of the answers."""
        rules, partition = self._settings.watch, self._settings.partition
        fields = watched_fields() if rules else JOB_FIELDS
        # Each task of an array that waits is a job of its own.
        arrays = ("--array",) if rules else ()
        terminator = new_terminator()
        # Jobs first: a job that starts between the two queries then counts twice, as waiting and in its node's use,
        # which does no harm. The other way round it would count as started on a node that still looks free.
        of_jobs = self._ask("squeue", *ALL_LOCAL, "--states=all", *arrays, format_option(fields, terminator))
        # Jobs of other partitions may wait for the same nodes.
        of_nodes = self._ask("sinfo", *ALL_LOCAL, "--Node", format_option(NODE_FIELDS, terminator))
        nodes = parse_nodes(of_nodes, terminator, [name for name in partition.split(",") if name])
        self._spelling = nodes.spelling
        self._capacities = {node.name: node.capacity for node in nodes.nodes}
        jobs = parse_jobs(
            of_jobs, terminator, fields=fields, rules=rules, sharing=self._settings.sharing, partition=partition,
            tasks=self._tasks, capacities=self._capacities, known_users=self._known_users,
        )  # fmt: skip
        users = {(job.handle, job.submitted): job.user for job in jobs.jobs if not may_be_unknown(job.user)}
        self._known_users = {**self._known_users, **users} if jobs.unreadable else users
        # Options of jobs whose records were unreadable are kept: another thread may be starting their tasks.
        self._options_missing = bool(jobs.unreadable)
        self._options_by_job = {**self._options_by_job, **jobs.options} if jobs.unreadable else jobs.options
        self._partitions = nodes.partitions
        if not jobs.unreadable:
            self._stopper.forget_all_but({job.identity for job in jobs.jobs if not job.state.ended})
        for remark in (*jobs.unknown, *nodes.unknown, *jobs.unreadable, *nodes.unreadable):
            self._report_once(remark)
        return jobs, nodes

    def _ask_excluded_of_listed(self, jobs: Jobs, waiting: Iterable[WaitingJob]) -> None:
        """Ask for the nodes that jobs with tasks, and jobs that wait for room, exclude.

        If squeue does not answer, the next listing asks again.
        """
        unended = [job for job in jobs.jobs if not job.state.ended]
        validity = {job.shown_id: AnswerValidity(job.submitted, job.state is RmJobState.PENDING) for job in unended}
        self._excluded.forget_all_but(validity)
        tags = (parse_tag(job.tag) for job in unended if job.tag)
        asked = {tag[0].id for tag in tags if tag is not None} & jobs.options.keys()
        asked |= {job.shown_id for job in waiting}
        try:
            self._excluded.ask({id_: key for id_, key in validity.items() if id_ in asked or id_ in self._excluded})
        except ResourceManagerError as error:
            log.warning("cannot read which nodes jobs exclude; the last answer is used", error=str(error))

    def start_allowance(self) -> StartAllowance:
        """See ``RateLimitedManager``."""
        return self._rate.start_allowance()

    def call_statistics(self) -> CallStatistics:
        """See ``RateLimitedManager``."""
        return self._rate.statistics()

    def final_states(self, handles: Collection[str]) -> tuple[RmJob, ...]:
        """See ``AccountingManager``. Empty if Slurm has no accounting."""
        return self._accounting.final_states([handle for handle in handles if handle.isascii() and handle.isdecimal()])

    def _ask(self, *argv: str) -> str:
        answer = self._commands.run(*argv, more=LISTING_ENVIRONMENT, overloaded_if_late=True)
        if answer.status != 0:
            error = failure(f"{argv[0]} failed", answer)
            raise error if isinstance(error, Unavailable) else Unavailable(f"{argv[0]} failed", said=error.said)
        return answer.stdout

    def submit(self, task: TaskSpec) -> str:
        """See ``ResourceManager``. After ``Unavailable`` the job may exist: look for its tag in a listing."""
        if not self._capacities:
            self.listing()
        check_fits(task, self._capacities)
        if self._options_missing and task.job.id not in self._options_by_job:
            raise Unavailable(
                f"a part of squeue's last answer could not be read, and job {task.job.id} is not in the rest: its task "
                "is started as soon as squeue's answer has the job again"
            )
        task = structs.replace(task, owner=self._owner_now(task))
        as_owner = self._uid == 0 or task.owner.uid != self._uid
        if task.job.id in self._options_by_job and task.job.id not in self._excluded:
            self._excluded.ask({task.job.id: AnswerValidity(task.job.submitted, waits=False)})
        inherited = self._options_of(task.job.id)
        if task.avoid:
            excluded = ",".join(name for name in (inherited.exclude, *task.avoid) if name)
            inherited = structs.replace(inherited, exclude=excluded)
        chosen = task_partitions(task.owner.partition, self._settings.partition)
        names = partitions_of(chosen, task.node, self._partitions)
        # What is left of its anchor's, where that is known.
        anchor_ends = inherited.ends or (math.inf if inherited.unlimited else 0)
        most = self._max_seconds_by_job.get(task.job.id, self._max_task_seconds)
        now = self._clock()
        backfill_seconds = self._allocation_rules.at(now, ask=False).backfill_seconds
        time_limit, time_min = (
            task_time_limits(anchor_ends, now, most, names, self._partitions, backfill_seconds)
            if anchor_ends
            else (self._settings.time_limit, "")
        )
        if time_limit:
            names = partitions_that_allow(time_limit_minutes(time_limit), names, self._partitions)
        argv = sbatch_arguments(
            task, self._settings, self._spelling,
            as_owner=as_owner, partition=",".join(names), time_limit=time_limit, time_min=time_min, anchor=inherited,
        )  # fmt: skip
        text = batch_script(task)
        self._submit_rate.take()
        try:
            answer = self._control.submit(argv, text)
        finally:
            self._void_listing()
        where = f" on {task.node}" if task.node else ""
        what = f"submission of {task.name} of job {task.job.id} for {task.owner.user}{where}"
        if answer.status != 0:
            error = failure(what, answer)
            if type(error) is not Rejected:
                raise error
            if task.node and NODE_REFUSED.search(error.said):
                raise NodeRefused(what, said=error.said)
            # Where the QOS has the flag DenyOnLimit.
            words = error.said.replace(";", " ").split()
            never = (never_starts(word, task.name, task.owner.qos, self._limits.bounds) for word in words)
            raise next((NeverStarts(what, said=text) for text in never if text), error)
        if not answer.job_id:
            raise Rejected(f"{what}: no job id in its answer", said=(answer.stdout + answer.stderr)[:500])
        log.info("task submitted", tag=task.tag, node=task.node, handle=answer.job_id)
        return answer.job_id

    def _owner_now(self, task: TaskSpec) -> Owner:
        """The owner of a task, with the partitions of its tasks, account and QOS of its anchor where that is listed.

        They may have changed since the job registered, as after it was requeued.
        """
        anchor = self._options_by_job.get(task.job.id)
        if anchor is None:
            return task.owner
        return replace(task.owner, partition=anchor.partition, account=anchor.account, qos=anchor.qos)

    def _void_listing(self) -> None:
        """See to it that neither the last listing nor one that is being read is given out again."""
        self._last_change, self._last = object(), None

    def _options_of(self, job: str) -> AnchorOptions:
        """Options of a job's anchor that its tasks get, as far as they are known, and those of the settings."""
        known = without_magnetic(self._options_by_job.get(job, NO_OPTIONS), self._magnetic)
        if excluded := self._excluded.of(job):
            known = structs.replace(known, exclude=excluded)
        return structs.replace(known, **self._site_options) if self._site_options else known

    def _with_excluded(self, job: WaitingJob) -> WaitingJob:
        """A waiting job with the nodes that it excludes, as far as they are known."""
        excluded = self._excluded.of(job.shown_id)
        return replace(job, options=structs.replace(job.options, exclude=excluded)) if excluded else job

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """See ``ResourceManager`` and ``Stopper``."""
        self._last = None
        self._stopper.cancel_due()
        self._stopper.stop(jobs, grace)

    def requeue(self, anchor: RmIdentity, seconds: float) -> None:
        """See ``RequeuingManager``."""
        try:
            requeue(self._commands, anchor, seconds)
        finally:
            self._void_listing()

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """See ``ResourceManager``. The proof is a munge credential with the payload ``dl2d:<job id>``."""
        self._rate.check_registrations()
        socket = self._settings.munge_socket
        uid = proven_uid(self._commands, proof, f"dl2d:{rm_id}", subject=f"job {rm_id}", socket=socket)
        with self._rate.registration(uid):
            found = authenticate_anchor(self._commands, rm_id, uid, cluster=self._cluster_name())
            self._excluded.ask({found.key.id: AnswerValidity(found.key.submitted, waits=False)})
        # The next tick starts its tasks by its anchor's options, which a listing from before it started lacks.
        self._void_listing()
        own = found.owner.partition
        partition = task_partitions(own, self._settings.partition)
        remarks = list(found.remarks)
        if partition != own:
            remarks.append(f"tasks of this job run in partition {partition}, not in {own} as its batch job does")
        return replace(found, owner=replace(found.owner, partition=partition), remarks=tuple(remarks))

    def authenticate_user(self, credential: str, payload: str) -> int:
        """See ``UserAuthenticator``; the credential is munge's."""
        return proven_uid(
            self._commands, credential, payload, subject="this request to this daemon",
            socket=self._settings.munge_socket, seconds=USER_SECONDS,
            hint="DL2_DAEMON, if it is set, must be exactly the URL in the daemon's address file",
        )  # fmt: skip

    def probe(self, runner: str, user: str, seconds: float) -> Sequence[ProbeStep]:
        """See ``ProbeManager``."""
        return probe(
            self._commands, self._control, self._settings, runner, user, seconds, timer=self._timer, sleep=self._sleep
        )

    def _cluster_name(self) -> str:
        if not self._cluster:
            # It stands in URLs and file names.
            self._cluster = re.sub(r"[^A-Za-z0-9_-]", "-", configured(self._commands, "ClusterName"))[:64]
        return self._cluster

    def close(self) -> None:
        """End the thread that keeps the deadlines of ``stop``; running tasks go on."""
        self._stopper.close()
        self._control.close()


def _report(remark: str) -> None:
    log.warning("unexpected answer from Slurm", remark=remark)
