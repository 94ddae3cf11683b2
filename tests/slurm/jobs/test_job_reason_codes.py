"""Every reason for which jobs wait in Slurm 22.05 to 26.05 has a meaning; of others only names of limits are used."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from slurm_fakes import FakeSlurm, Managers, job_row

from dl2d_slurm.jobs.job_reason_codes import (
    WAITING_REASONS,
    Bound,
    SiteLimit,
    WaitsFor,
    bound,
    is_node_refused,
    site_limit,
    waiting_reason,
    waits_for_room,
)

#: Of the packages of this machine's Slurm.
LIBRARY = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so")
#: What later releases than 22.05 added.
LATER = """
    Constraints ReservationInvalid MaxPoweredUpNodes MpiPortsBusy NvidiaImexChannels MaxCpuRunMinsPerAccount
    MaxCpuRunMinsPerUser MaxGRESRunMinsPerAccount MaxGRESRunMinsPerUser MaxMemoryRunMinsPerUser MaxNodeRunMinsPerUser
""".split()  # noqa: SIM905


def names_of_this_release() -> set[str]:
    """What the library calls the reasons of all numbers; numbers without a reason have none, or a word for it."""
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} is not installed")
    library = ctypes.CDLL(str(LIBRARY))
    try:
        name_of = library.slurm_job_state_reason_string
    except AttributeError:  # up to 22.05
        name_of = library.slurm_job_reason_string
    name_of.restype = ctypes.c_char_p
    names = {(name_of(number) or b"").decode() for number in range(300)}
    words = {name for name in names if name.isalpha() and not name.startswith("Inva")}
    return words | (names & WAITING_REASONS.keys())


def test_every_reason_of_this_machines_slurm_has_a_meaning() -> None:
    names = names_of_this_release()
    assert len(names) >= 190
    assert names - WAITING_REASONS.keys() == set()


@pytest.mark.parametrize("name", LATER)
def test_every_reason_of_later_releases_has_a_meaning(name: str) -> None:
    assert waiting_reason(name) is WAITING_REASONS[name]


@pytest.mark.parametrize(
    ("reason", "waits_for"),
    [
        ("Resources", WaitsFor.ROOM),
        ("Priority", WaitsFor.ROOM),
        ("ReqNodeNotAvail, UnavailableNodes:n3", WaitsFor.NODE),
        ("ReqNodeNotAvail, May be reserved for other job", WaitsFor.NODE),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", WaitsFor.NODE),
        ("PartitionTimeLimit", WaitsFor.NODE),
        ("Constraints", WaitsFor.NODE),
        ("Reservation gpus was deleted", WaitsFor.NODE),
        ("QOSGrpGRES", WaitsFor.LIMIT),
        ("Job's QOS not permitted to use this partition (gpu allows high not normal)", WaitsFor.LIMIT),
        ("", WaitsFor.OTHER),
        ("None", WaitsFor.OTHER),
        ("BeginTime", WaitsFor.OTHER),
        ("JobHeldAdmin", WaitsFor.OTHER),
        ("Licenses", WaitsFor.OTHER),
        ("RaisedSignal:53(Real-time_signal_19)", WaitsFor.OTHER),
        ("launch failed requeued held", WaitsFor.OTHER),
        ("burst_buffer/lua: stage-in: no space", WaitsFor.OTHER),
    ],
)
def test_what_reasons_mean_for_scaling(reason: str, waits_for: WaitsFor) -> None:
    assert waiting_reason(reason) is waits_for
    assert (site_limit(reason) is not None) == (waits_for is WaitsFor.LIMIT)
    assert (waits_for_room(reason), is_node_refused(reason)) == (waits_for is WaitsFor.ROOM, waits_for is WaitsFor.NODE)


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        ("AssocGrpGRES", SiteLimit(("account", "user"), "gres")),
        ("AssocGrpCPURunMinutesLimit", SiteLimit(("account",), "cpu")),
        ("AssocGrpBilling", SiteLimit(("account",), "")),
        ("AssocGrpJobsLimit", SiteLimit(("account", "user"), "")),
        ("AssocMaxJobsLimit", SiteLimit(("account", "user"), "")),
        ("AssocMaxMemPerJob", SiteLimit((), "memory")),
        ("QOSGrpNodeLimit", SiteLimit(("qos",), "")),
        ("QOSMaxGRESPerUser", SiteLimit(("qos", "user"), "gres")),
        ("QOSMinGRES", SiteLimit((), "")),
        ("QOSMaxWallDurationPerJobLimit", SiteLimit((), "")),
        ("QOSUsageThreshold", SiteLimit(("qos", "account", "user"), "")),
        # Of a quality of service, for each account or user.
        ("MaxMemoryPerAccount", SiteLimit(("qos", "account"), "memory")),
        ("MaxCpuRunMinsPerUser", SiteLimit(("qos", "user"), "cpu")),
        ("MaxMemPerLimit", SiteLimit((), "memory")),
        ("AccountNotAllowed", SiteLimit((), "")),
    ],
)
def test_whom_and_what_the_limit_of_a_reason_limits(reason: str, limit: SiteLimit) -> None:
    assert site_limit(reason) == limit


def test_which_limits_a_job_never_meets_as_it_was_submitted() -> None:
    assert {name for name in WAITING_REASONS if bound(name) is Bound.LEAST} == {"QOSMinGRES"}
    most = {name for name in WAITING_REASONS if bound(name) is Bound.MOST}
    assert most == {"AssocMaxGRESPerJob", "AssocMaxGRESPerNode", "QOSMaxGRESPerJob", "QOSMaxGRESPerNode"}
    assert (bound("QOSGrpGRES"), bound("Resources"), bound("")) == (None, None, None)


@pytest.mark.parametrize("reason", ["ReqNodeDancing", "ResourcesOfMars", "Nodes are tired"])
def test_nothing_is_concluded_from_an_unknown_reason(reason: str) -> None:
    assert waiting_reason(reason) is None
    assert site_limit(reason) is None
    assert (waits_for_room(reason), is_node_refused(reason)) == (False, False)


def test_an_unknown_reason_is_a_remark_on_each_listing_and_one_line_of_the_log(
    slurm: FakeSlurm, manager_on: Managers, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = {"State": "PENDING", "NodeList": "", "Reason": "GrpDancers"}
    slurm.answer("squeue", rows=[job_row(1, **waiting), job_row(2, **waiting), job_row(3, Reason="Mars")])
    manager = manager_on()
    for _ in range(2):
        listing = manager.listing()
        assert [remark for remark in listing.remarks if "GrpDancers" in remark] == list(listing.remarks)
        assert len(listing.remarks) == 1
        assert not listing.incomplete
        assert not listing.claims
        assert [(job.node_refused, job.limit) for job in listing.jobs] == [(False, None)] * 3
    assert capsys.readouterr().out.count("GrpDancers") == 1


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        ("QOSGrpDancers", SiteLimit(("qos",), "")),
        ("QOSMaxGRESDancesPerUser", SiteLimit(("qos", "user"), "gres")),
        ("AssocGrpCpuDances", SiteLimit(("account", "user"), "cpu")),
        ("AssocMaxMemDancesPerJob", SiteLimit((), "memory")),
    ],
)
def test_an_unknown_limit_of_an_association_or_qos_is_a_limit_and_is_reported(
    slurm: FakeSlurm, manager_on: Managers, reason: str, limit: SiteLimit
) -> None:
    assert waiting_reason(reason) is None
    assert site_limit(reason) == limit
    mark = "dl2:fake.1.1795253932:worker-0"
    waiting = {"State": "PENDING", "NodeList": "", "Reason": reason, "Comment": mark}
    slurm.answer("squeue", rows=[job_row(1), job_row(2, **waiting)])
    listing = manager_on().listing()
    (remark,) = listing.remarks
    assert f"unknown reason {reason!r}" in remark
    assert "taken as a limit" in remark
    (task,) = (job for job in listing.jobs if job.handle == "2")
    assert task.limit is not None
    assert reason in task.limit.reason
    assert not task.node_refused


@pytest.mark.parametrize(
    ("reason", "any_node"),
    [
        *((reason, True) for reason in ("Licenses", "JobHeldUser", "JobHeldAdmin", "BeginTime", "Dependency")),
        *((reason, False) for reason in ("Resources", "Priority", "None", "Prolog", "JobLaunchFailure", "Mars")),
        *((reason, False) for reason in ("ReqNodeNotAvail, UnavailableNodes:n3", "launch failed requeued held")),
    ],
)
def test_reasons_that_say_nothing_of_the_node(
    slurm: FakeSlurm, manager_on: Managers, reason: str, any_node: bool
) -> None:
    slurm.answer("squeue", rows=[job_row(1, State="PENDING", NodeList="", Reason=reason)])
    (job,) = manager_on().listing().jobs
    assert job.any_node is any_node


def test_of_a_sentence_only_the_first_words_are_shown(slurm: FakeSlurm, manager_on: Managers) -> None:
    reason = "Nodes are tired of /home/alice/secret"
    slurm.answer("squeue", rows=[job_row(1, State="PENDING", NodeList="", Reason=reason)])
    (remark,) = manager_on().listing().remarks
    assert "'Nodes are tired'" in remark
    assert "secret" not in remark
