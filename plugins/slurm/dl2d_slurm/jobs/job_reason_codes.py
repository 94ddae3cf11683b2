"""Why jobs wait in Slurm's queue: what each reason of Slurm 22.05 to 26.05 means for scaling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from dl2d_slurm.commands.values_in_command_output import value_or_empty


class WaitsFor(Enum):
    """What has to happen before a job starts that waits for a reason."""

    #: There is room: then it starts.
    ROOM = "room"
    #: It is not started on the node that it asks for, or not with its options, whatever is free.
    NODE = "node"
    #: A limit of an association or quality of service leaves room.
    LIMIT = "limit"
    #: Something that neither room nor another node changes: a hold, another job, a time, a licence.
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SiteLimit:
    """A limit of an association or quality of service, by the reason of a job that waits for it."""

    #: What the limited jobs have in common with it: some of ``qos``, ``account`` and ``user``; nothing if it limits
    #: each job by itself. The ``qos`` is that of the job or that of its partition.
    shared: tuple[str, ...]
    #: ``cpu``, ``memory`` or ``gres``; empty for all that a job may have.
    resource: str


#: Names of limits: of associations, of qualities of service, and last of a job alone (``_OF_JOB_ALONE``).
_LIMITS = """
AssocGrpBB AssocGrpBBMinutes AssocGrpBBRunMinutes AssocGrpBilling AssocGrpBillingMinutes AssocGrpBillingRunMinutes
AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpCpuLimit AssocGrpEnergy AssocGrpEnergyMinutes
AssocGrpEnergyRunMinutes AssocGrpGRES AssocGrpGRESMinutes AssocGrpGRESRunMinutes AssocGrpJobsLimit AssocGrpLicense
AssocGrpLicenseMinutes AssocGrpLicenseRunMinutes AssocGrpMemLimit AssocGrpMemMinutes AssocGrpMemRunMinutes
AssocGrpNodeLimit AssocGrpNodeMinutes AssocGrpNodeRunMinutes AssocGrpSubmitJobsLimit AssocGrpUnknown
AssocGrpUnknownMinutes AssocGrpUnknownRunMinutes AssocGrpWallLimit AssocMaxBBMinutesPerJob AssocMaxBBPerJob
AssocMaxBBPerNode AssocMaxBillingMinutesPerJob AssocMaxBillingPerJob AssocMaxBillingPerNode
AssocMaxCpuMinutesPerJobLimit AssocMaxCpuPerJobLimit AssocMaxCpuPerNode AssocMaxEnergyMinutesPerJob
AssocMaxEnergyPerJob AssocMaxEnergyPerNode AssocMaxGRESMinutesPerJob AssocMaxGRESPerJob AssocMaxGRESPerNode
AssocMaxJobsLimit AssocMaxLicenseMinutesPerJob AssocMaxLicensePerJob AssocMaxMemMinutesPerJob AssocMaxMemPerJob
AssocMaxMemPerNode AssocMaxNodeMinutesPerJob AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit
AssocMaxUnknownMinutesPerJob AssocMaxUnknownPerJob AssocMaxUnknownPerNode AssocMaxWallDurationPerJobLimit
AssociationJobLimit AssociationResourceLimit AssociationTimeLimit

QOSGrpBB QOSGrpBBMinutes QOSGrpBBRunMinutes QOSGrpBilling QOSGrpBillingMinutes QOSGrpBillingRunMinutes
QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpCpuLimit QOSGrpEnergy QOSGrpEnergyMinutes QOSGrpEnergyRunMinutes
QOSGrpGRES QOSGrpGRESMinutes QOSGrpGRESRunMinutes QOSGrpJobsLimit QOSGrpLicense QOSGrpLicenseMinutes
QOSGrpLicenseRunMinutes QOSGrpMemLimit QOSGrpMemoryMinutes QOSGrpMemoryRunMinutes QOSGrpNodeLimit QOSGrpNodeMinutes
QOSGrpNodeRunMinutes QOSGrpSubmitJobsLimit QOSGrpUnknown QOSGrpUnknownMinutes QOSGrpUnknownRunMinutes QOSGrpWallLimit
QOSJobLimit QOSMaxBBPerJob QOSMaxBBPerNode QOSMaxBBPerUser QOSMaxBillingMinutesPerJob QOSMaxBillingPerJob
QOSMaxBillingPerNode QOSMaxBillingPerUser QOSMaxCpuMinutesPerJobLimit QOSMaxCpuPerJobLimit QOSMaxCpuPerNode
QOSMaxCpuPerUserLimit QOSMaxEnergyMinutesPerJob QOSMaxEnergyPerJob QOSMaxEnergyPerNode QOSMaxEnergyPerUser
QOSMaxGRESMinutesPerJob QOSMaxGRESPerJob QOSMaxGRESPerNode QOSMaxGRESPerUser QOSMaxJobsPerUserLimit
QOSMaxLicenseMinutesPerJob QOSMaxLicensePerJob QOSMaxLicensePerUser QOSMaxMemoryMinutesPerJob QOSMaxMemoryPerJob
QOSMaxMemoryPerNode QOSMaxMemoryPerUser QOSMaxNodeMinutesPerJob QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit
QOSMaxSubmitJobPerUserLimit QOSMaxUnknownMinutesPerJob QOSMaxUnknownPerJob QOSMaxUnknownPerNode QOSMaxUnknownPerUser
QOSMaxWallDurationPerJobLimit QOSMinBB QOSMinBilling QOSMinCpuNotSatisfied QOSMinEnergy QOSMinGRES QOSMinLicense
QOSMinMemory QOSMinNode QOSMinUnknown QOSResourceLimit QOSTimeLimit QOSUsageThreshold
MaxBBPerAccount MaxBillingPerAccount MaxCpuPerAccount MaxEnergyPerAccount MaxGRESPerAccount MaxJobsPerAccount
MaxLicensePerAccount MaxMemoryPerAccount MaxNodePerAccount MaxSubmitJobsPerAccount MaxUnknownPerAccount
MaxBBRunMinsPerAccount MaxBillingRunMinsPerAccount MaxCpuRunMinsPerAccount MaxEnergyRunMinsPerAccount
MaxGRESRunMinsPerAccount MaxLicenseRunMinsPerAccount MaxMemoryRunMinsPerAccount MaxNodeRunMinsPerAccount
MaxUnknownRunMinsPerAccount MaxBBRunMinsPerUser MaxBillingRunMinsPerUser MaxCpuRunMinsPerUser MaxEnergyRunMinsPerUser
MaxGRESRunMinsPerUser MaxLicenseRunMinsPerUser MaxMemoryRunMinsPerUser MaxNodeRunMinsPerUser MaxUnknownRunMinsPerUser

AccountNotAllowed AccountingPolicy MaxMemPerLimit QOSNotAllowed
""".split()  # noqa: SIM905
#: Names of limits that each job meets or not, whatever others have, beside those with one of these parts in them.
_OF_JOB_ALONE = frozenset({"AccountNotAllowed", "AccountingPolicy", "MaxMemPerLimit", "QOSNotAllowed"})
_JOB_ALONE_PARTS = ("PerJob", "PerNode", "TimeLimit")
#: The limited resource, by part of a limit's name.
_LIMITED = {"GRES": "gres", "CPU": "cpu", "MEM": "memory"}


#: Limits of resources or jobs of several running jobs together that slurmctld tells with their use
#: (``association_limits``).
_OF_RUNNING_JOBS = frozenset(
    {
        *("AssocGrpCpuLimit", "AssocGrpGRES", "AssocGrpJobsLimit", "AssocGrpMemLimit", "AssocMaxJobsLimit"),
        *("QOSGrpCpuLimit", "QOSGrpGRES", "QOSGrpJobsLimit", "QOSGrpMemLimit"),
        *("QOSMaxCpuPerUserLimit", "QOSMaxGRESPerUser", "QOSMaxJobsPerUserLimit", "QOSMaxMemoryPerUser"),
        *("MaxCpuPerAccount", "MaxGRESPerAccount", "MaxJobsPerAccount", "MaxMemoryPerAccount"),
    }
)


def _site_limit(name: str) -> SiteLimit:
    resource = next((limited for part, limited in _LIMITED.items() if part in name.upper()), "")
    if name.startswith("QOSMin"):  # a job that demands too little gets nothing more
        return SiteLimit((), "")
    if name in _OF_JOB_ALONE or any(part in name for part in _JOB_ALONE_PARTS):
        return SiteLimit((), resource)
    if name == "QOSUsageThreshold":  # of its user's usage in the account
        return SiteLimit(("qos", "account", "user"), resource)
    if name.startswith("Assoc"):
        # The maximum of an association is that of a user in an account. So may a group's be: the reason is the same for
        # the limits of a user, of the account and of those above it. Where the account's are read from slurmctld
        # (association_limits), what is left is the user's.
        is_read = (resource and "Minutes" not in name) or name == "AssocGrpJobsLimit"
        of_account = name.startswith("AssocGrp") and not is_read
        return SiteLimit(("account",) if of_account else ("account", "user"), resource)
    each = [part.lower() for part in ("Account", "User") if f"Per{part}" in name]
    return SiteLimit(("qos", *each), resource)


#: Names of bounds that each job meets or not as it was submitted, on whatever node and however long it waits: those on
#: GPUs and other generic resources. How many CPUs and how much memory a job is given depends on the node, and these are
#: what Slurm holds against the bounds on CPUs and memory.
_BOUND = re.compile(r"(QOSMinGRES)|(?:Assoc|QOS)MaxGRESPer(?:Job|Node)(?:Limit)?")


class Bound(Enum):
    """What a job demands too little or too much of to be ever started."""

    LEAST = "least"
    MOST = "most"


#: squeue(1), JOB REASON CODES, and the other names that Slurm's library has for reasons.
WAITING_REASONS: Mapping[str, WaitsFor] = {
    name: meaning
    for meaning, names in {
        WaitsFor.ROOM: ("Resources", "Priority"),
        WaitsFor.NODE: (
            *("ReqNodeNotAvail", "NodeDown", "FrontEndDown", "BadConstraints", "Constraints"),
            *("Reservation", "ReservationDeleted", "ReservationInvalid", "PartitionConfig", "PartitionDown"),
            *("PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit"),
        ),
        WaitsFor.LIMIT: _LIMITS,
        WaitsFor.OTHER: (
            # Slurm has not looked at the job yet, or tries again soon by itself.
            *("None", "WaitingForScheduling", "Prolog", "Cleaning", "SchedDefer", "FedJobLock"),
            *("JobHeldAdmin", "JobHeldUser", "JobHoldMaxRequeue", "BeginTime", "DeadLine", "Dependency"),
            *("DependencyNeverSatisfied", "JobArrayTaskLimit", "Licenses", "InvalidAccount", "InvalidQOS"),
            *("BurstBufferOperation", "BurstBufferResources", "BurstBufferStageIn", "MpiPortsBusy"),
            *("NvidiaImexChannels", "BlockFreeAction", "BlockMaxError"),
            # Nothing of dl2d is put on nodes without power.
            *("MaxPoweredUpNodes", "PowerNotAvail", "PowerReserved"),
            # How its last run ended, of a job that has been put back into the queue.
            *("InactiveLimit", "JobLaunchFailure", "NonZeroExitCode", "OutOfMemory", "RaisedSignal"),
            *("SystemFailure", "TimeLimit"),
        ),
    }.items()
    for name in names
}

#: Beginnings of sentences that Slurm shows in a reason's place. Limits in them are of the job alone.
_SENTENCES: Mapping[str, WaitsFor] = {
    "Nodes required for job are": WaitsFor.NODE,
    "Required Node not available": WaitsFor.NODE,
    "Reservation ": WaitsFor.NODE,  # gpus was deleted
    "Job's QOS ": WaitsFor.LIMIT,
    "Job's account ": WaitsFor.LIMIT,
    "launch fail": WaitsFor.OTHER,  # launch failed requeued held
    "user env retrieval failed": WaitsFor.OTHER,
    "job requeued in ": WaitsFor.OTHER,  # held state, special exit state
    "Prolog": WaitsFor.OTHER,
    "burst_buffer": WaitsFor.OTHER,  # its plug-in says what
    "Burst buffer ": WaitsFor.OTHER,
}
#: A name; ``ReqNodeNotAvail`` says more behind a comma, and ``RaisedSignal`` behind a colon.
_NAME = re.compile(r"([A-Za-z]+)(?:[,:(].*)?", re.DOTALL)


#: Beginnings of the other reasons that may be the node's fault: how the last run ended, and what prepares the node.
_OF_NODE = (
    *("Prolog", "Cleaning", "JobLaunchFailure", "NonZeroExitCode", "OutOfMemory", "RaisedSignal"),
    *("SystemFailure", "MpiPortsBusy", "NvidiaImexChannels", "BurstBuffer", "burst_buffer", "Burst buffer "),
    *("Block", "Power", "MaxPoweredUpNodes", "InactiveLimit", "TimeLimit", "launch fail", "user env retrieval failed"),
)
#: Names of limits, also of those that later releases may add.
_UNKNOWN_LIMIT = re.compile(r"(?:Assoc|QOS)[A-Z][A-Za-z]*")


@lru_cache(4096)
def waiting_reason(text: str) -> WaitsFor | None:
    """What the reason of a job that waits means, as squeue shows it; None for one that no table has."""
    if not value_or_empty(text):
        return WaitsFor.OTHER
    name = _NAME.fullmatch(text)
    if name is not None and name[1] in WAITING_REASONS:
        return WAITING_REASONS[name[1]]
    return next((meaning for beginning, meaning in _SENTENCES.items() if text.startswith(beginning)), None)


def is_node_refused(reason: str) -> bool:
    """Whether a job that waits for this reason will not be started on the node that it asks for."""
    return waiting_reason(reason) is WaitsFor.NODE


def says_nothing_of_node(reason: str) -> bool:
    """Whether a job that waits for this reason would wait on any other node, too: held, licences, begin time."""
    is_other = waiting_reason(reason) is WaitsFor.OTHER
    return is_other and bool(value_or_empty(reason)) and not reason.startswith(_OF_NODE)


def site_limit(reason: str) -> SiteLimit | None:
    """The limit that a reason such as ``QOSGrpGRES`` names; None if it names none.

    A name that no table has is read like the known ones: newer releases of Slurm limit further resources.
    """
    found, name = waiting_reason(reason), _NAME.fullmatch(reason)
    if found is WaitsFor.LIMIT:
        return _site_limit(name[1]) if name is not None else SiteLimit((), "")
    return _site_limit(reason) if found is None and _UNKNOWN_LIMIT.fullmatch(reason) else None


def bound(reason: str) -> Bound | None:
    """The bound that keeps a job with this reason from being ever started as it was submitted; None if none does."""
    found = _BOUND.fullmatch(reason)
    return None if found is None else Bound.LEAST if found[1] else Bound.MOST


def waits_for_room(reason: str) -> bool:
    """Whether a job that waits for this reason starts once there is room.

    All others (held, dependency, begin time, limits of a QOS or an association, licences, nodes that are down) remain
    where there is room, and a job that Slurm has not looked at yet has no reason.
    """
    return waiting_reason(reason) is WaitsFor.ROOM


def waits_for_running_jobs(reason: str) -> bool:
    """Whether a job that waits for this reason starts once other jobs hold less of a limit that slurmctld tells."""
    return reason in _OF_RUNNING_JOBS
