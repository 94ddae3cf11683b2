"""A probe: which job it submits, how its report is read, and that it never stays."""

from __future__ import annotations

import getpass

import pytest
from slurm_fakes import Clock, FakeSlurm, Managers, job_row

from dl2d.core.errors import NotFound, Rejected
from dl2d.core.resource_manager import ProbeManager

RUNNER = "/opt/dl2d/bin/dl2-run"


def row(state: str, **more: object) -> dict[str, object]:
    return job_row(77, State=state, **more)


def texts(steps) -> list[str]:
    return [f"{'ok' if step.good else 'WRONG'} {step.item}: {step.text}" for step in steps]


def test_a_small_job_runs_dl2_run_on_a_node_and_its_comment_says_what_it_found(slurm: FakeSlurm, manager_on: Managers):
    manager = manager_on(partition="gpu", sbatch_options=["--reservation=ml"], munge_socket="/run/m")
    assert isinstance(manager, ProbeManager)
    report = "dl2d probe: ok address https://head:8910 (/x)|WRONG connection port 8910 of head cannot be reached|"
    slurm.answer("squeue", rows=[row("FAILED", Comment=report, exit_code=256)])
    steps = manager.probe(RUNNER, "", 120.0)
    assert texts(steps) == [
        "ok probe job: job 77 was submitted to partition gpu",
        "ok node: job 77 ran on n1",
        "ok address: https://head:8910 (/x)",
        "WRONG connection: port 8910 of head cannot be reached",
    ]
    (call,) = slurm.calls("sbatch")
    assert {"--partition=gpu", "--nodes=1", "--ntasks=1", "--time=3", "--no-requeue", "--output=/dev/null"} < set(
        call.argv
    )
    assert call.argv[-1] == "--reservation=ml"
    assert not any(word.startswith(("--uid", "--gid")) for word in call.argv)
    assert f"runner={RUNNER}\n" in call.stdin
    assert call.env["MUNGE_SOCKET"] == "/run/m"
    assert slurm.calls("scancel") == []


def test_the_job_of_a_named_user(slurm: FakeSlurm, manager_on: Managers):
    slurm.answer("squeue", rows=[row("COMPLETED", Comment="dl2d probe: ok munge x")])
    manager_on().probe(RUNNER, getpass.getuser(), 60.0)
    assert any(word.startswith("--uid=") for word in slurm.calls("sbatch")[0].argv)
    with pytest.raises(NotFound, match="there is no user nobody-here"):
        manager_on().probe(RUNNER, "nobody-here", 60.0)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (row("PENDING", NodeList="", Reason="Resources"), "it is PENDING (Resources)"),
        (row("RUNNING"), "it is RUNNING on n1"),
    ],
)
def test_a_job_that_does_not_end_in_time_is_cancelled(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock, last, says: str
):
    slurm.answer("squeue", rows=[last])
    before = clock.now
    steps = manager_on().probe(RUNNER, "", 30.0)
    assert texts(steps)[1:] == [f"WRONG node: job 77 did not end within 30 s and was cancelled: {says}"]
    assert clock.now - before == pytest.approx(30, abs=1)
    assert [call.argv for call in slurm.calls("scancel")] == [["scancel", "77"]]


def test_a_controller_that_does_not_answer_is_asked_again_until_the_end(
    slurm: FakeSlurm, manager_on: Managers, clock: Clock
):
    slurm.answer("squeue", status=1, stderr="Unable to contact slurm controller (connect failure)")
    steps = manager_on().probe(RUNNER, "", 5.0)
    assert "it is not listed (slurmctld does not answer)" in steps[1].text
    assert len(slurm.calls("squeue")) == 5
    assert len(slurm.calls("scancel")) == 1


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ([row("FAILED", exit_code=768)], "left no report: scontrol cannot be run on this node"),
        ([row("NODE_FAIL", Reason="NodeDown")], "left no report: NODE_FAIL, NodeDown"),
        ([], "left no report: not listed any more"),
    ],
)
def test_a_job_without_a_report(slurm: FakeSlurm, manager_on: Managers, last, says: str):
    slurm.answer("squeue", rows=last)
    assert says in manager_on().probe(RUNNER, "", 30.0)[1].text
    assert slurm.calls("scancel") == []


def test_what_dl2_run_of_another_version_says_is_shown(slurm: FakeSlurm, manager_on: Managers):
    report = "dl2d probe: usage: dl2-run [options]|dl2-run: error: unrecognized arguments: --check-daemon"
    slurm.answer("squeue", rows=[row("FAILED", Comment=report)])
    steps = manager_on().probe(RUNNER, "", 30.0)
    assert texts(steps)[-1] == "WRONG dl2-run: dl2-run: error: unrecognized arguments: --check-daemon"


def test_a_job_that_slurm_refuses(slurm: FakeSlurm, manager_on: Managers):
    slurm.answer("sbatch", status=1, stderr="sbatch: error: invalid partition specified: gpu")
    with pytest.raises(Rejected, match=r"submitting a probe job.*invalid partition"):
        manager_on().probe(RUNNER, "", 30.0)
