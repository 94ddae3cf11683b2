from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from daemon.api.api_world import COMMAND, REQUEST, SCRIPT, SECRET_OF_THE_USER, ApiWorld, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tick.world import GivesNothing

from dl2d.core.cluster import TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import StoreUnavailable, Unavailable
from dl2d.core.jobs import JobKey, JobState, Role
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resource_manager import (
    Anchor,
    CallStatistics,
    ContainerOrder,
    ContainerReport,
    RmJob,
    RmJobState,
    StaticJob,
)
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange, TaskReport
from dl2d.daemon.api import job_routes
from dl2d.daemon.api.heartbeat import MAX_PLANS
from dl2d.daemon.api.request_limits import heartbeat_interval
from dl2d.daemon.health_and_metrics import Health
from dl2d.daemon.job_views_from_store import StoreViews
from dl2d.testing import OWNER, MemoryManager, make_nodes


@pytest.fixture
def world() -> Iterator[ApiWorld]:
    world = ApiWorld()
    yield world
    world.close()


@pytest.fixture
def slurm_like() -> Iterator[ApiWorld]:
    world = ApiWorld(starts_anchors=False)
    yield world
    world.close()


def everything(world: ApiWorld) -> tuple[object, ...]:
    """All that the store keeps."""
    return (world.store.jobs(live=False), world.store.tasks(live=False), world.store.resizes(), world.store.slots())


def running(world: ApiWorld, **changes: object) -> JobKey:
    key = world.settled(max_workers=2, max_ps=1, **changes)
    assert world.has(key) == (2, 1)
    return key


def too_many_members() -> list[dict[str, object]]:
    """Members that a job may not have, of which a coordinator says what they use."""
    names = [("worker", f"worker-{number}") for number in range(9999, 10_050)]
    names += [("ps", f"server {number}") for number in range(50)]
    usage = {"cpu_seconds": 1.0}
    return [{"task": name, "role": role, "state": "active", "usage": usage} for role, name in names]


@pytest.mark.parametrize("gap", [0.0, 1200.0])
def test_the_time_to_drain_a_task_begins_with_the_first_answer_after_a_gap(world: ApiWorld, gap: float) -> None:
    """While the store is locked, or the daemon stands still, neither ticks nor heartbeats get through.

    The task may hold weights of the job, and its coordinator learns only now that it is to drain it.
    """
    key = running(world)
    leaving = world.tasks(key)[1]

    def beat() -> None:
        assert world.post_beat(key, {"address": "127.0.0.1:1", "state": "running"}).status_code == 200

    def ticks(count: int) -> bool:
        for _ in range(count):
            world.tick(5.0)
            beat()
        return leaving.handle in world.manager.stopped

    assert not ticks(2)
    world.store.change_tasks([TaskChange(key, leaving.id, TaskState.DRAINING)], world.now)
    world.tick(1.0)
    world.now += gap
    world.elapsed += gap
    beat()
    assert not ticks(9)
    assert ticks(5)


class TestRegistration:
    def test_an_anchor_that_the_manager_authenticates_becomes_a_job(self, world):
        key = world.add_anchor()
        world.manager.anchors["7"] = replace(world.manager.anchors["7"], remarks=("its licences are its own",))
        answer = world.register()
        assert answer.status_code == 200
        assert answer.json() == {
            "job": key.slug,
            "credential": world.credentials.for_job(key),
            "token": world.credentials.token(key),
            "heartbeat_seconds": 1.5,
            "static": False,
            "remarks": ["its licences are its own"],
        }
        job = world.store.job(key)
        assert (job.request.name, job.request.epochs, job.anchor, job.state) == ("mine", 3, "7", JobState.SUBMITTED)
        assert job.launch.argv == ("python", "train.py")
        assert world.woken == 1

    def test_demands_are_what_a_resource_manager_of_whole_cpus_gives(self, world):
        """Slurm gives a task of half a CPU, or of none, a whole one: twice as many would be packed as can start."""
        world.defaults = Resources.of(cpu=1)
        world.add_anchor(script="#DL2 worker=cpu:1.5 ps=gpu:1 model=resnet-50 epochs=1 samples_per_epoch=10\n")
        assert world.register().status_code == 200
        (job,) = world.store.jobs(live=True)
        assert job.request.worker == Resources.of(cpu=2)
        assert job.request.ps == Resources.of(cpu=1, gpu=1)

    def test_fractions_that_a_resource_manager_of_whole_numbers_does_not_give_are_refused(self, world):
        """It would refuse each start. Managers that give fractions take them."""
        script = "#DL2 worker=gpu:0.5 ps=cpu:0.5,gpu:a100:1.5 model=resnet-50 epochs=1 samples_per_epoch=10\n"
        world.add_anchor(script=script)
        world.defaults = Resources.of(cpu=1)
        refused = world.register()
        assert refused.status_code == 422
        told = refused.json()["error"]
        assert "worker: gpu=0.5 cannot be given, since gpu is given in whole numbers only; demand gpu:1" in told
        assert "ps: gpu:a100=1.5 cannot be given, since gpu:a100 is given in whole numbers only" in told

    @pytest.mark.parametrize(
        ("demand", "gpus"), [("gpu:a100:2", 2), ("gpu:1,gpu:a100:2", 2), ("gpu:3,gpu:a100:1,gpu:v100:1", 3)]
    )
    def test_gpus_that_are_demanded_by_type_count_among_those_of_any_type(self, demand: str, gpus: int):
        """Otherwise jobs that demand any GPU, and others that demand those of a type, would be given the same ones."""
        world = ApiWorld(
            cluster_nodes=make_nodes(2, **{"cpu": 8, "gpu": 4, "gpu:a100": 2, "gpu:v100": 2}),
            defaults=Resources.of(cpu=1),
            starts_anchors=False,
        )
        world.add_anchor(script=f"#DL2 worker=cpu:1,{demand} model=resnet-50 epochs=1 samples_per_epoch=10\n")
        answer = world.register()
        (job,) = world.store.jobs(live=True)
        world.close()
        assert answer.status_code == 200
        typed = {name: job.request.worker.get(name) for name in ("gpu:a100", "gpu:v100")}
        assert job.request.worker == Resources.of({"cpu": 1, "gpu": gpus, **typed})

    @pytest.mark.parametrize("mode", [Mode.LIVE, Mode.OBSERVE])
    def test_the_next_run_of_a_requeued_job_registers_with_its_own_command_and_for_the_present_mode(
        self, slurm_like, mode
    ):
        """Its environment names the scratch folder of this run; where dl2d does not act, it starts its own tasks.

        While it waited, it may have been given to another account.
        """
        world = slurm_like
        key = world.add_anchor()
        world.register()
        world.manager.put(RmJob(handle="7", state=RmJobState.RUNNING, user=OWNER.user, submitted=key.submitted), ())
        world.heartbeat(key)
        world.mode = mode
        later = key._replace(submitted=key.submitted + 500)
        requeued = RmJob(handle="7", state=RmJobState.PENDING, user=OWNER.user, submitted=later.submitted, requeues=1)
        world.manager.put(requeued, ())
        world.tick()
        assert world.store.job(key).state is JobState.LOST
        owner = replace(OWNER, account="another", partition="other")
        world.manager.anchors["7"] = Anchor(later, owner, "mine", SCRIPT)
        run = {"argv": ["python", "train.py"], "cwd": "/home/ann", "env": {"SCRATCH": "/scratch/7.1"}}
        answer = world.post("/v1/register", {"rm_id": "7", "proof": OWNER.user, "address": "host:2", **run})
        assert (answer.status_code, answer.json()["job"]) == (200, later.slug)
        assert answer.json()["static"] is (mode is Mode.OBSERVE)
        job = world.store.job(later)
        assert job.owner == owner
        assert (job.static, job.launch.env) == (
            (False, (("SCRATCH", "/scratch/7.1"),)) if mode is Mode.LIVE else (True, ())
        )

    def test_a_requeued_job_registers_while_a_tick_finds_that_it_was_requeued(self, slurm_like, monkeypatch):
        """As it happens when the daemon returns: the tick has listed the job, and adds its next run only after that."""
        world = slurm_like
        key = world.add_anchor()
        world.register()
        later = key._replace(submitted=key.submitted + 500)
        world.manager.put(
            RmJob(handle="7", state=RmJobState.RUNNING, user=OWNER.user, submitted=later.submitted, requeues=1), ()
        )
        world.manager.anchors["7"] = Anchor(later, OWNER, "mine", SCRIPT)
        run = {"env": {"SCRATCH": "/scratch/7.1"}}
        is_registering, has_ticked = threading.Event(), threading.Event()
        list_for_tick = world.access.listing
        answers = []

        def check_of_the_registration(*_):
            is_registering.set()
            assert has_ticked.wait(30)

        def listing_of_the_tick(*args):
            listed = list_for_tick(*args)
            monkeypatch.setattr(job_routes, "check_options", check_of_the_registration)
            answers.append(world.at_once(1, lambda: world.register(**run)))
            assert is_registering.wait(30)
            return listed

        monkeypatch.setattr(world.access, "listing", listing_of_the_tick)
        world.tick()
        assert world.store.job(later).launch.env != (("SCRATCH", "/scratch/7.1"),)
        has_ticked.set()
        (answer,) = answers[0]()
        assert (answer.status_code, answer.json().get("job")) == (200, later.slug)
        assert world.store.job(later).launch.env == (("SCRATCH", "/scratch/7.1"),)

    def test_registrations_take_nothing_of_what_ticks_may_ask(self, slurm_like, monkeypatch):
        """They need the nodes' capacities only, so that the last tick's listing will do, if it is not old."""
        world = slurm_like
        world.tick()
        listings, list_jobs = [], world.manager.listing

        def counted(*args):
            listings.append(args)
            return list_jobs(*args)

        monkeypatch.setattr(world.manager, "listing", counted)
        world.add_anchor(script=SCRIPT + "#DL2 ps=gpu:3")
        world.add_anchor("8")
        for _ in range(3):
            assert "gpu: wanted 3, had 2" in error(world.register())
        assert world.register("8").status_code == 200
        assert listings == []
        world.now += 301
        world.register()
        assert len(listings) == 1

    def test_many_at_once_and_again_are_one_job(self, world):
        world.add_anchor()
        answers = [*world.at_once(6, world.register)(), world.register()]
        assert {(answer.status_code, answer.text) for answer in answers} == {(200, answers[0].text)}
        assert len(world.store.jobs(live=False)) == 1

    def test_a_wrong_proof_and_an_unknown_job_are_refused(self, world):
        world.add_anchor()
        before = everything(world)
        refused = world.register(proof="somebody else")
        assert (refused.status_code, error(refused)) == (403, "job 7 is not yours")
        unknown = world.register("8")
        assert (unknown.status_code, error(unknown)) == (404, "no job 8")
        assert everything(world) == before

    def test_whose_job_it_is_can_be_verified_without_registering_it(self, world):
        world.add_anchor()
        before = everything(world)
        answer = world.post("/v1/authenticate", {"rm_id": "7", "proof": OWNER.user})
        assert (answer.status_code, answer.json()) == (200, {"job": "7", "user": OWNER.user})
        refused = world.post("/v1/authenticate", {"rm_id": "7", "proof": "somebody else"})
        assert (refused.status_code, error(refused)) == (403, "job 7 is not yours")
        assert everything(world) == before

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            ("#!/bin/sh\nexec dl2-run x\n", ["#DL2", "no #DL2 lines"]),
            ("#!/bin/sh\n\n#DL2 epochs\n", ["line 3", "'epochs' is not key=value"]),
            (SCRIPT.replace("resnet-50", "resnet-51"), ["unknown model type 'resnet-51'", "mean resnet-50", "vgg-16"]),
            (SCRIPT.replace("epochs=3", "epoch=3"), ["epochs: missing (is 'epoch' meant?)"]),
            (SCRIPT.replace("cpu:2", "cpu:2,tpu:1"), ["worker: no node", "tpu: wanted 1, had 0"]),
            (SCRIPT + "#DL2 ps=gpu:3", ["ps: no node is large enough", "gpu: wanted 3, had 2"]),
            (SCRIPT + "#DL2 architecture=ring", ["architecture", "ring"]),
            (SCRIPT + "#DL2 consistency=async", ["consistency: this version trains with consistency=sync only"]),
        ],
    )  # fmt: skip
    def test_a_bad_request_is_explained_and_nothing_is_kept(self, world, script, words):
        world.add_anchor(script=script)
        before = everything(world)
        answer = world.register()
        assert answer.status_code == 422
        for word in words:
            assert word in error(answer)
        assert everything(world) == before

    @pytest.mark.parametrize("script", [SCRIPT, "#!/bin/sh\nexec dl2-run x\n"])
    def test_options_given_at_submission_come_before_lines_of_the_script(self, world, script):
        options = "#DL2 model=vgg-16 epochs=7 samples_per_epoch=100 worker=cpu:1 allowed_workers=1,2"
        key = world.add_anchor(script=script, options=options)
        seen = {"epochs": "7", "allowed_workers": "1,2"}
        assert world.register(options=seen).status_code == 200
        request = world.store.job(key).request
        assert (request.model, request.epochs, request.allowed_workers) == ("vgg-16", 7, (1, 2))

    @pytest.mark.parametrize(
        ("options", "seen", "words"),
        [
            ("#DL2 epochs=7 epochs=8", {}, "options at submission, line 1: epochs: is given twice"),
            ("#DL2 colour=red", {}, "colour: unknown key"),
            ("#DL2 epochs=x", {"epochs": "x"}, "epochs: expected a number"),
            ("", {"epochs": "7"}, "epochs: was given to sbatch, but is not in the job's AdminComment"),
            ("#DL2 epochs=8", {"epochs": "7"}, "epochs: was given to sbatch, but is not in the job's AdminComment"),
        ],
    )
    def test_bad_options_and_options_that_were_not_kept_are_explained(self, world, options, seen, words):
        world.add_anchor(options=options)
        before = everything(world)
        answer = world.register(options=seen)
        assert (answer.status_code, words in error(answer)) == (422, True), error(answer)
        assert everything(world) == before

    def test_a_job_that_has_ended_may_not_come_back(self, world):
        key = world.add_anchor()
        world.register()
        world.store.change_job(key, JobChange(state=JobState.CANCELLED, end_reason="cancelled by ann"), world.now)
        answer = world.register()
        assert (answer.status_code, error(answer)) == (409, "job 7 has ended already: cancelled by ann")

    def test_a_manager_that_is_away_is_a_503_that_says_so(self, world, monkeypatch):
        def away(*_: object) -> None:
            raise Unavailable("scontrol", said="Unable to contact slurm controller")

        monkeypatch.setattr(world.manager, "authenticate", away)
        answer = world.register()
        assert (answer.status_code, error(answer)) == (503, "scontrol: Unable to contact slurm controller")

    def test_heartbeats_are_answered_while_registrations_wait_for_a_long_tick(self, world):
        job = running(world)
        world.access.wait_seconds = 60.0
        refused: list[int] = []

        def register() -> Any:
            answer = world.register("9")
            refused.append(answer.status_code)
            return answer

        with world.access.lock:
            answers = world.at_once(60, register)
            # Those that may not even wait are told at once; the threads that serve heartbeats are free.
            while len(refused) < 60 - 8:
                assert world.heartbeat(job, state="running").status_code == 200
        assert sorted(answer.status_code for answer in answers()) == [404] * 8 + [503] * 52

    def test_anchors_are_authenticated_beside_a_tick_where_the_manager_allows_it(self, monkeypatch):
        world = ApiWorld(parallel_authentication=True)
        try:
            world.add_anchor()
            authenticate, go_on = world.manager.authenticate, threading.Event()
            inside = threading.Semaphore(0)

            def slow(rm_id: str, proof: str) -> Any:
                inside.release()
                assert go_on.wait(30)
                return authenticate(rm_id, proof)

            monkeypatch.setattr(world.manager, "authenticate", slow)
            answers = world.at_once(8, world.register)
            for _ in range(8):
                assert inside.acquire(timeout=30)
            world.tick()
            # More than these do not wait: heartbeats need threads too.
            assert world.register().status_code == 503
            go_on.set()
            assert [answer.status_code for answer in answers()] == [200] * 8
            assert len(world.store.jobs(live=True)) == 1
        finally:
            world.close()

    def test_who_waited_in_vain_is_asked_to_come_again(self, world):
        world.access.wait_seconds = 0.01
        with world.access.lock:
            answer = world.register()
        assert answer.status_code == 503
        assert "try again" in error(answer)


class TestSubmission:
    def test_a_job_is_kept_with_the_account_of_the_daemon(self, world):
        answer = world.send_job(name="mine")
        assert answer.status_code == 200
        said = answer.json()
        job = world.store.job(JobKey.from_slug(said["job"]))
        assert (said["id"], said["name"], job.request.name) == (job.key.id, "mine", "mine")
        assert job.launch.env == tuple(sorted(COMMAND["env"].items()))
        assert world.woken == 1

    @pytest.mark.parametrize("credential", ["", "wrong", "é" * 64, "0" * 64])
    def test_a_wrong_credential_is_refused(self, world, credential):
        answer = world.send_job(credential)
        assert answer.status_code == 403
        assert "this is not the credential of the daemon's account: run dl2d as that account" in error(answer)
        assert world.store.jobs(live=False) == ()

    def test_a_jobs_own_credential_submits_nothing(self, world):
        job = world.submit()
        assert world.send_job(world.credentials.for_job(job)).status_code == 403
        assert world.send_job(world.credentials.token(job)).status_code == 403

    def test_the_same_name_twice_is_a_duplicate_until_the_first_has_ended(self, world):
        first = world.send_job(name="mine").json()
        before = everything(world)
        answer = world.send_job(name="mine")
        assert answer.status_code == 409
        assert error(answer) == (
            f"job {first['id']} is called 'mine' already and has not ended; "
            "give the new one another name, or cancel the other first"
        )
        assert everything(world) == before
        world.store.change_job(JobKey.from_slug(first["job"]), JobChange(state=JobState.CANCELLED), world.now)
        again = world.send_job(name="mine").json()
        assert int(again["id"]) == int(first["id"]) + 1  # a refusal uses no number up

    def test_no_name_and_another_jobs_number_are_no_duplicates(self, world):
        first = world.send_job()
        again, numbered = world.send_job(), world.send_job(name=first.json()["id"])
        assert [answer.status_code for answer in (first, again, numbered)] == [200] * 3

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model": "resnet"}, ["unknown model type 'resnet'", "this site knows resnet-50, vgg-16"]),
            ({"epochs": 0}, ["epochs: expected a number, more than 0", "got 0"]),
            ({"worker": {"cpu": 9}}, ["worker: no node is large enough for one (cpu: wanted 9, had 8 on n1)"]),
            ({"ps": {"gpu": 2.5}}, ["ps: no node is large enough", "gpu: wanted 2.5, had 2"]),
            ({"colour": "red"}, ["colour: unknown key"]),
            ({"name": "\ud800"}, ["name: expected a name"]),
            ({"\ud800": 1}, ["unknown key"]),
            ({"name": ["a"]}, ["name: expected a name"]),
            ({"samples_per_epoch": None}, ["samples_per_epoch: missing"]),
        ],
    )
    def test_a_bad_request_is_explained_and_nothing_is_kept(self, world, changes, words):
        before = everything(world)
        answer = world.send_job(**changes)
        assert answer.status_code == 422, answer.text
        for word in words:
            assert word in error(answer)
        assert everything(world) == before
        assert world.woken == 0

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"argv": []}, "argv"),
            ({"argv": [""]}, "command: is empty"),
            ({"argv": ["a\0b"]}, "NUL byte"),
            ({"argv": ["\ud800"]}, "not UTF-8"),
            ({"env": {"NAME": "\udc80"}}, "not UTF-8"),
            ({"cwd": "home/ann"}, "cwd: must be an absolute path, got 'home/ann'"),
            ({"env": {"A": "x" * 300_000}}, "larger than 262144 bytes"),
            ({"env": {"A": 3}}, "env: Value error, the value of 'A' is not a string"),
            ({"env": {"PATH": "/bin", "WANDB_API_KEY": "x"}}, "env.WANDB_API_KEY: looks like a secret"),
            ({"more": 1}, "more"),
            ({"cwd": None}, "cwd"),
            ({"cwd": "/home" + 4092 * "x"}, "cwd: is longer than 4096 bytes, as no path may be"),
        ],
    )
    def test_a_bad_command_is_explained(self, world, change, words):
        body = {"request": REQUEST, **COMMAND, **change}
        answer = world.post("/v1/jobs", body, world.credentials.for_submission())
        assert answer.status_code == 422
        assert words in error(answer)
        assert SECRET_OF_THE_USER not in answer.text

    def test_on_a_cluster_with_tools_of_its_own_jobs_come_through_those(self, slurm_like):
        answer = slurm_like.send_job()
        assert answer.status_code == 409
        assert "sbatch" in error(answer)


class TestObserving:
    """The API while another scheduler is in charge."""

    @pytest.fixture(autouse=True, params=[Mode.OBSERVE, Mode.SHADOW])
    def _mode(self, world, request):
        world.mode = request.param

    def test_an_anchor_registers_and_starts_its_tasks_itself(self, world):
        key = world.add_anchor()
        answer = world.register()
        assert (answer.status_code, answer.json()["static"]) == (200, True)
        job = world.store.job(key)
        assert (job.static, job.unreported, job.request.epochs) == (True, False, 3)
        assert (job.launch.argv, job.launch.env) == ((), ())
        assert world.register().json() == answer.json()
        # It stays so, whatever the mode is later.
        world.mode = Mode.LIVE
        assert world.register().json()["static"] is True

    def test_it_has_no_more_tasks_than_it_may_have_whatever_it_reports(self, world):
        """A row is kept for each."""
        key = world.add_anchor()
        world.register()
        assert world.heartbeat(key, state="running", members=too_many_members()).status_code == 200
        job = world.store.job(key)
        assert (job.progress.workers, job.progress.ps) == (job.request.max_workers, job.request.max_ps)
        assert world.store.task_reports(key) == ()
        last = job.request.max_workers + 99  # one that replaces another has a new number
        members = [
            {"task": f"worker-{number}", "role": "worker", "state": "active", "usage": {"cpu_seconds": 1.0}}
            for number in (0, last, last + 1)
        ]
        assert world.heartbeat(key, state="running", members=members).status_code == 200
        assert [report.task for report in world.store.task_reports(key)] == ["worker-0", f"worker-{last}"]

    def test_members_keep_their_reports_when_no_more_can_join(self, world):
        """A member's number may then be larger than what the job may still have."""
        key = world.add_anchor()
        world.register()
        member = {"task": "worker-110", "role": "worker", "state": "active", "usage": {"cpu_seconds": 1.0}}
        world.heartbeat(key, state="running", members=[member])
        world.heartbeat(key, state="running", members=[member], most_workers=1)
        assert world.store.job(key).request.max_workers == 1
        now = {**member, "usage": {"cpu_seconds": 2.0}}
        invented = [{**now, "task": f"worker-{number}"} for number in range(101, 400) if number != 110]
        world.heartbeat(key, state="running", members=[now, *invented])
        (report,) = world.store.task_reports(key)
        assert (report.task, report.cpu_seconds) == ("worker-110", 2.0)

    def test_texts_on_its_tasks_are_cut(self, world):
        """It may name 20,000 tasks; the daemon gives it none, and so does not know which there are."""
        key = world.add_anchor()
        world.register()
        member = {"task": "worker-0", "role": "worker", "state": "left", "cause": "failed", "how": "x" * 4000}
        slow = {"task": "worker-0", "factor": 2.0, "reason": "y" * 4000}
        assert world.heartbeat(key, state="running", members=[member], stragglers=[slow]).status_code == 200
        (report,) = world.store.task_reports(key)
        assert (report.how, report.slowdown_reason) == ("x" * 500, "y" * 500)

    def test_what_it_declares_takes_the_place_of_what_was_seen(self, world):
        key = world.add_anchor()
        static = StaticJob(
            name="seen", model="vgg-16", owner=OWNER, workers=2, task=Resources.of(cpu=1), nodes=("n1", "n2"),
            limit=7200,
        )  # fmt: skip
        world.manager.set_static("7", static, RmJobState.RUNNING, submitted=key.submitted)
        world.tick()
        assert (world.store.job(key).request.model, world.has(key)) == ("vgg-16", (2, 0))
        assert world.register().status_code == 200
        job = world.store.job(key)
        assert (job.request.model, job.request.epochs, job.request.name) == ("resnet-50", 3, "mine")
        members = [{"task": f"worker-{number}", "role": "worker", "state": "active"} for number in range(3)]
        members += [{"task": "ps-0", "role": "ps", "state": "active"}]
        world.now += 5
        answer = world.heartbeat(key, state="running", members=members, epoch=0.5, samples_per_second=12.0)
        assert answer.json() == {
            "members": ["worker-0", "worker-1", "worker-2", "ps-0"], "stop": False, "heartbeat_seconds": 1.5
        }  # fmt: skip
        report = world.tick()
        assert [entry.allocation for entry in report.decision.jobs] == [(3, 1)]
        assert {task.node for task in report.snapshot.tasks} == {"n1"}
        assert report.snapshot.jobs[0].progress.epoch == 0.5
        (speeds,) = world.store.job_speeds([key])
        assert [(point.allocation, point.samples_per_second) for point in speeds.points] == [((3, 1), 12.0)]
        world.heartbeat(key, state="finished", members=[], epoch=3.0, result={"digest": "ab" * 32, "versions": 9})
        assert world.store.job(key).state is JobState.FINISHED
        assert world.tasks() == ()
        assert {task.state for task in world.store.tasks(live=False)} == {TaskState.RELEASED}
        assert world.tick().decision.jobs == ()
        assert world.manager.submitted == world.manager.stopped == []

    def test_nothing_is_submitted_and_nothing_of_others_cancelled(self, world):
        refused = world.send_job()
        assert refused.status_code == 409
        assert error(refused).startswith(f"the daemon is in mode {world.mode}, in which it starts no jobs; ")
        key = world.add_anchor()
        world.register()
        refused = world.cancel(key.slug)
        assert (refused.status_code, error(refused)) == (
            409, "dl2d only observes job 7: end it where it was submitted"
        )  # fmt: skip
        assert not world.store.job(key).state.ended


class TestHeartbeat:
    def test_only_the_jobs_own_credential_counts(self, world):
        job, other = world.submit(), world.submit()
        for shown in ("", "wrong", world.credentials.for_job(other), world.credentials.token(job),
                      world.credentials.for_submission()):  # fmt: skip
            answer = world.heartbeat(job, shown)
            assert (answer.status_code, error(answer)) == (403, f"this is not the credential of job {job.slug}")
        assert world.store.job(job).state is JobState.SUBMITTED
        assert world.heartbeat(job).status_code == 200

    def test_an_unknown_job_is_told_apart_only_by_who_has_its_credential(self, world):
        nobody = JobKey("test", "99", 1)
        assert world.heartbeat(nobody).status_code == 404
        assert world.heartbeat(nobody, "guess").status_code == 403
        answer = world.post("/v1/jobs/not-a-slug/heartbeat", {}, "x")
        assert (answer.status_code, error(answer)) == (404, "'not-a-slug' is not the name of a job")

    def test_the_first_one_makes_a_job_ready_and_asks_for_a_tick(self, world):
        job = world.submit()
        answer = world.heartbeat(job)
        assert answer.json() == {"members": [], "stop": False, "heartbeat_seconds": 1.5}
        assert (world.store.job(job).state, world.store.job(job).address) == (JobState.READY, "host:1")
        assert world.woken == 1
        world.heartbeat(job)
        assert world.woken == 1  # nothing new

    def test_members_move_their_tasks_and_the_answer_names_those_wanted(self, world):
        job = running(world)
        answer = world.heartbeat(
            job, state="running", version=5, epoch=0.5, loss=0.25, members=[
                {"task": "worker-0", "role": "worker", "state": "active"},
                {"task": "ps-0", "role": "ps", "state": "active"},
            ],
        )  # fmt: skip
        assert answer.json()["members"] == ["worker-0", "worker-1", "ps-0"]
        progress = world.store.job(job).progress
        assert (progress.version, progress.epoch, progress.loss, progress.workers, progress.ps) == (5, 0.5, 0.25, 1, 1)

    @pytest.mark.parametrize(
        ("declared", "batches", "epoch", "speed"),
        [
            ({"samples_per_epoch": 100, "batch": 10}, 1, 2.5, 40.0),
            ({"samples_per_epoch": 1000, "batch": 10}, 3, 0.75, 120.0),
            ({"samples_per_epoch": 100, "batch": 10}, None, 2.5, 40.0),
            ({"samples_per_epoch": None, "steps_per_epoch": 50, "batch": None}, 3, 0.5, 4.0),
            ({"samples_per_epoch": None, "steps_per_epoch": 50, "batch": 10}, 3, 0.5, 40.0),
            ({"samples_per_epoch": 10, "batch": 10, "epochs": 3.0}, 1, 3.0, 40.0),
        ],
    )
    def test_progress_of_a_script_with_a_loop_of_its_own_follows_from_its_updates(
        self, world, declared, batches, epoch, speed
    ):
        job = world.submit(**declared)
        world.heartbeat(job, state="running", version=25, steps_per_second=4.0, batches_per_version=batches)
        progress = world.store.job(job).progress
        assert (progress.epoch, progress.samples_per_second) == (epoch, speed)
        world.heartbeat(job, state="running", version=25, steps_per_second=0.0)
        assert world.store.job(job).progress.samples_per_second is None  # it stands still: nothing was measured

    def test_epochs_that_a_script_had_done_before_count(self, world):
        job = world.submit(samples_per_epoch=100, batch=10, epochs=10.0)
        world.heartbeat(job, state="running", version=25, batches_per_version=1, epochs_before=5)
        assert world.store.job(job).progress.epoch == 7.5
        # its versions go on, too: they were those of other numbers of workers
        world.heartbeat(job, state="running", version=125, batches_per_version=1, epochs_before=5, versions_before=100)
        assert world.store.job(job).progress.epoch == 7.5
        world.heartbeat(job, state="finished", version=55, batches_per_version=1, epochs_before=5)
        assert world.store.job(job).progress.epoch == 10.0

    def test_a_job_that_no_worker_can_join_is_given_no_more(self, world):
        job = world.submit(min_workers=2, max_workers=8, allowed_workers=[2, 4, 8])
        for most, bounds in ((9, (2, 8, (2, 4, 8))), (4, (2, 4, (2, 4))), (1, (1, 1, ()))):
            assert world.heartbeat(job, state="running", most_workers=most).status_code == 200
            request = world.store.job(job).request
            assert (request.min_workers, request.max_workers, request.allowed_workers) == bounds

    def test_joined_active_draining_left(self, world):
        job = world.submit(max_workers=1, max_ps=1)
        world.heartbeat(job)
        world.tick()

        def say(state: str) -> TaskState:
            members = [{"task": "worker-0", "role": "worker", "state": state}]
            assert world.heartbeat(job, members=members).status_code == 200
            return next(task.state for task in world.store.tasks(live=False, job=job) if task.id == "worker-0")

        assert say("draining") is TaskState.ASKED
        assert say("joined") is TaskState.JOINED
        assert say("active") is TaskState.CONFIRMED
        assert say("joined") is TaskState.CONFIRMED  # never backwards
        assert say("left") is TaskState.CONFIRMED  # nobody asked it to leave: how it ended is the manager's word
        world.store.change_tasks([TaskChange(job, "worker-0", TaskState.DRAINING)], world.now)
        assert world.heartbeat(job).json()["members"] == ["ps-0"]
        assert say("active") is TaskState.DRAINING
        assert say("left") is TaskState.DRAINED

    def test_only_changes_of_state_ask_for_a_tick_and_those_of_tasks_not_at_any_rate(self, world):
        job = world.settled(max_workers=3, max_ps=1)
        woken = world.woken
        for said in ({"address": "h:1"}, {"address": "h:2"}, {"state": "waiting", "most_workers": 2}):
            assert world.heartbeat(job, **{"state": "running", **said}).status_code == 200
        assert world.woken == woken
        asked = []
        for task in world.tasks(job):
            world.store.change_tasks([TaskChange(job, task.id, TaskState.DRAINING)], world.now)
            left = {"task": task.id, "role": task.role.value, "state": "left"}
            assert world.heartbeat(job, state="running", members=[left]).status_code == 200
            asked.append(world.woken - woken)
            world.now += 5.0 if len(asked) == 3 else 0.0
        assert asked == [1, 2, 2, 3]
        world.heartbeat(job, state="finished", epochs=3.0)
        assert world.woken - woken == 4

    def test_a_task_whose_coordinator_has_lost_it_is_replaced_and_ended(self, world):
        """Its node has crashed and is back: Slurm lists the task as running for some minutes more."""
        job = running(world)
        members = [{"task": "worker-0", "role": "worker", "state": "left", "cause": None}]
        for cause, state in (("killed", TaskState.CONFIRMED), ("lost", TaskState.DRAINED)):
            members[0]["cause"], members[0]["how"] = cause, "silent for 31 s"
            assert world.heartbeat(job, state="running", members=members).status_code == 200
            lost = next(task for task in world.tasks(job) if task.id == "worker-0")
            assert lost.state is state
        assert lost.note == "its coordinator gave up this task: silent for 31 s"
        report = world.tick(1.0)
        assert [start.role for start in report.plan.starts] == [Role.WORKER]
        assert world.manager.stopped == []
        world.tick(world.timeouts.end_seconds + 1.0)
        assert world.manager.stopped == [lost.handle]

    def test_members_that_no_task_accounts_for_are_logged_not_each_time_and_change_nothing(self, request):
        world = ApiWorld(beat_burst=250.0)
        request.addfinalizer(world.close)
        job = running(world)
        before = world.store.tasks(live=False)
        member = {"task": "worker-77", "role": "worker", "state": "active"}
        with capture_logs() as logs:
            answers = [world.heartbeat(job, state="running", members=[member]).status_code for _ in range(3)]
        assert answers == [200, 200, 200]
        assert world.store.tasks(live=False) == before
        assert [entry["members"] for entry in logs if entry["event"] == "unknown members"] == [("worker-77",)]

    def test_a_job_is_measured_only_at_the_size_that_its_tasks_make(self, world):
        """Speeds at sizes are shared by all jobs of a kind: a job cannot report them at sizes that it does not have."""
        job = world.settled(max_workers=8, max_ps=8)
        tasks = world.tasks(job)
        gone, *left = (task for task in tasks if task.role is Role.WORKER)
        world.store.change_tasks([TaskChange(job, gone.id, TaskState.RELEASED)], world.now)
        own = [{"task": task.id, "role": "worker", "state": "active"} for task in tasks]
        invented = [{"task": f"{role}-{n}", "role": role, "state": "active"} for role in ("worker", "ps")
                    for n in range(70, 78)]  # fmt: skip
        assert world.heartbeat(job, state="running", members=own + own + invented).status_code == 200
        progress = world.store.job(job).progress
        assert (progress.workers, progress.ps) == (len(left), len(tasks) - len(left) - 1)

    def test_what_tasks_use_is_kept(self, world):
        job = running(world)
        usage = {
            "seconds": 5.0, "cpu_seconds": 12.5, "cpu_percent": 250.0, "memory_bytes": 3 << 30, "memory_peak": 4 << 30,
            "processes": 3, "gpus": [{"name": "A", "percent": 90.0, "memory_bytes": 1 << 30, "memory_total": 80 << 30},
                                     {"name": "B", "percent": 30.0, "memory_bytes": 2 << 30, "memory_total": 80 << 30}],
        }  # fmt: skip
        worker = {"task": "worker-0", "role": "worker", "state": "active", "usage": usage,
                  "steps": {"steps": 9, "mean_ms": 20.5, "p95_ms": 31.0}}  # fmt: skip
        slow = {"task": "worker-0", "host": "n1", "factor": 2.1, "reason": "computes a shard in 2 ms, the others in 1"}
        stranger = {**worker, "task": "worker-77"}
        world.heartbeat(job, state="running", members=[worker, stranger], stragglers=[slow])
        (report,) = world.store.task_reports(job)
        assert report == TaskReport(
            task="worker-0", at=world.now, cpu_seconds=12.5, cpu_percent=250.0, memory=3072.0, memory_peak=4096.0,
            gpus=2, gpu_percent=60.0, gpu_memory=3072.0, step_ms=20.5, step_p95_ms=31.0, slowdown=2.1,
            slowdown_reason=slow["reason"],
        )  # fmt: skip
        # nothing new is said of it
        world.heartbeat(job, state="running", members=[{**worker, "usage": None, "steps": None}])
        assert world.store.task_reports(job) == (report,)
        how = "died: killed by signal 9 (SIGKILL): out of memory in its control group"
        ended = {**worker, "state": "left", "cause": "out-of-memory", "how": how + "\x1b"}
        world.heartbeat(job, state="running", members=[ended])
        (last,) = world.store.task_reports(job)
        assert (last.cause, last.how, last.slowdown) == ("out-of-memory", how + "\\x1b", None)

    @pytest.mark.parametrize(
        ("said", "state", "reason"),
        [
            ({"state": "finished", "result": {"digest": "abc", "versions": 9}, "epochs": 3.0}, JobState.FINISHED,
             "did all epochs"),
            # scripts with loops of their own
            ({"state": "finished", "result": {"digest": "abc", "versions": 10**7}, "version": 10**7}, JobState.FINISHED,
             "did all epochs"),
            ({"state": "finished", "result": {"digest": "abc", "versions": 9}, "version": 9}, JobState.FINISHED,
             "its script has ended"),
            ({"state": "finished", "result": {"digest": "abc", "versions": 9, "inexact_from": 4}, "inexact_from": 4,
              "epochs": 3.0},
             JobState.FINISHED,
             "did all epochs; inexact from version 4 on, because optimizer state was lost with a server"),
            ({"state": "failed", "reason": "worker-1 died: killed by signal 9"}, JobState.FAILED,
             "worker-1 died: killed by signal 9"),
            ({"state": "failed", "reason": "a\x1b[31m\0b\n"}, JobState.FAILED, "a\\x1b[31m\\x00b\n"),
            ({"state": "failed", "reason": "x" * 1_000_000}, JobState.FAILED, "x" * 4096),
            ({"state": "failed"}, JobState.FAILED, "no reason given"),
            ({"state": "cancelled"}, JobState.CANCELLED, "no reason given"),
        ],
    )  # fmt: skip
    def test_an_end_is_kept_and_a_late_word_is_told_to_stop(self, world, said, state, reason):
        job = running(world)
        answer = world.heartbeat(job, **said)
        assert (answer.status_code, answer.json()["stop"]) == (200, False)
        ended = world.store.job(job)
        assert (ended.state, ended.end_reason) == (state, reason)
        assert ended.digest == ("abc" if state is JobState.FINISHED else "")
        late = world.heartbeat(job, state="running", version=10**6)
        why = {"reason": reason} if state is JobState.FAILED else {}
        assert (late.status_code, late.json()) == (200, {"members": [], "stop": True, "heartbeat_seconds": 1.5, **why})
        assert world.store.job(job) == ended

    def test_a_job_whose_user_submitted_the_anchor_is_cancelled_when_the_anchor_is(self, slurm_like):
        """It may be in its queue again by now, and then goes on."""
        job = running(slurm_like)
        for said, reason in ("cancelled", "its coordinator got SIGTERM"), ("running", ""):
            slurm_like.heartbeat(job, state=said, reason="its coordinator got SIGTERM")
            kept = slurm_like.store.job(job)
            assert (kept.state, kept.end_reason) == (JobState.RUNNING, reason)

    def test_a_coordinator_that_is_ended_before_its_first_heartbeat_has_reported_all_the_same(self, slurm_like):
        key = slurm_like.add_anchor()
        slurm_like.register()
        for anchor, state in (RmJobState.RUNNING, JobState.READY), (RmJobState.DONE, JobState.CANCELLED):
            listed = RmJob(handle="7", state=anchor, user=OWNER.user, submitted=key.submitted)
            slurm_like.manager.put(listed, ())
            if state is JobState.READY:
                slurm_like.heartbeat(key, state="cancelled", reason="its coordinator got SIGTERM")
            slurm_like.tick()
            kept = slurm_like.store.job(key)
            assert (kept.state, kept.end_reason) == (state, "its coordinator got SIGTERM")

    def test_the_longest_host_name_that_there_is_fits(self, world):
        job, address = world.submit(), ".".join(["h" * 62] * 4) + ":65535"
        assert world.heartbeat(job, address=address).status_code == 200
        assert world.store.job(job).address == address

    def test_no_number_breaks_the_record(self, world):
        job = running(world)
        body = """{"address": "host:1", "state": "running", "epoch": NaN, "loss": Infinity, "epochs": 1e999,
            "steps_per_second": -Infinity, "plan": 1, "plans": [{"number": 1, "first_version": 0, "workers": 1,
            "servers": 1, "prepare_ms": NaN, "move_ms": Infinity, "suspension_ms": {"p50": NaN, "max": NaN}}]}"""
        answer = world.post_beat(job, body.encode())
        assert answer.status_code == 200, answer.text
        progress = world.store.job(job).progress
        assert (progress.epoch, progress.loss, progress.steps_per_second) == (0.0, None, None)
        plan = next(plan for plan in world.store.runtime_plans(job) if plan.number == 1)
        assert (plan.prepare_ms, plan.move_ms, plan.suspension_p50_ms) == (0.0, 0.0, 0.0)

    def test_an_absurd_speed_of_one_job_is_not_that_of_its_kind(self, world):
        """Jobs of a kind share their speeds: the heartbeats of another user's job went through them, and failed."""
        liar, honest = running(world), running(world)
        absurd = [{"samples_per_second": each} for each in (-5.0, 1e308, 5e-324, -1e308)]
        absurd += [{"steps_per_second": -1.0}, {"epoch": -1e308, "loss": -1e308}]
        for said in absurd:
            world.now += 20.0
            for job, speeds in ((liar, said), (honest, {"samples_per_second": 100.0})):
                members = [{"task": task.id, "role": task.role.value, "state": "active"} for task in world.tasks(job)]
                answer = world.heartbeat(job, state="running", members=members, **speeds)
                assert answer.status_code == 200, (said, answer.text)
        kinds = [TrainingKind.of(world.store.job(honest).request)]
        assert [point.samples_per_second for kind in world.store.speeds(kinds) for point in kind.points] == [100.0]
        progress = world.store.job(liar).progress
        assert (progress.epoch, progress.loss, progress.steps_per_second) == (0.0, None, None)

    def test_a_plan_reported_twice_is_kept_once(self, world):
        job = running(world)
        plan = {"number": 41, "first_version": 7, "workers": 3, "servers": 2, "added": ["worker-2"], "moved_bytes": 10,
                "suspension_ms": {"p50": 0.5, "max": 2}, "longest_step_ms": 90, "median_step_ms": 30.5}  # fmt: skip
        for _ in range(2):
            assert world.heartbeat(job, state="running", plans=[plan]).status_code == 200
        kept = [plan for plan in world.store.runtime_plans(job) if plan.number == 41]
        assert [(plan.added, plan.suspension_max_ms) for plan in kept] == [(("worker-2",), 2.0)]
        assert (kept[0].longest_step_ms, kept[0].median_step_ms) == (90.0, 30.5)

    def test_names_in_a_plan_are_those_of_tasks_and_no_more_than_a_job_may_have(self, world):
        job = running(world)
        plan = {"number": 41, "first_version": 7, "workers": 3, "servers": 2}
        many = [f"worker-{number}" for number in range(1000)]
        assert world.heartbeat(job, state="running", plans=[{**plan, "removed": many}]).status_code == 200
        kept = [plan for plan in world.store.runtime_plans(job) if plan.number == 41]
        assert kept[0].removed == ("worker-0", "worker-1", "worker-2")
        for name in ("x" * 300, "worker-1 ", "worker-"):
            assert world.heartbeat(job, state="running", plans=[{**plan, "added": [name]}]).status_code == 422

    def test_all_plans_of_a_report_together_have_a_bounded_number_of_tasks(self, world):
        job = world.submit(max_workers=32, max_ps=32)
        tasks = [f"worker-{number}" for number in range(64)]
        plans = [
            {"number": number, "first_version": 7, "workers": 3, "servers": 2, "added": tasks, "removed": tasks}
            for number in range(MAX_PLANS)
        ]
        assert world.heartbeat(job, state="running", plans=plans).status_code == 200
        kept = world.store.runtime_plans(job)
        assert len(kept) == MAX_PLANS
        assert sum(len(plan.added) + len(plan.removed) for plan in kept) == 20_000

    def test_of_a_long_list_of_plans_the_newest_are_kept(self, world):
        """Older runtimes reported all plans that the daemon had not taken yet."""
        job = world.submit()
        plans = [
            {"number": number, "first_version": 7, "workers": 3, "servers": 2} for number in range(1, MAX_PLANS + 51)
        ]
        assert world.heartbeat(job, state="running", plans=plans).status_code == 200
        assert [plan.number for plan in world.store.runtime_plans(job)] == [*range(51, MAX_PLANS + 51)]

    def test_tasks_that_a_job_does_not_have_do_not_count(self, world):
        job = running(world)
        assert world.heartbeat(job, state="running", members=too_many_members()).status_code == 200
        progress = world.store.job(job).progress
        assert (progress.workers, progress.ps) == (0, 0)
        assert world.store.task_reports(job) == ()

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"state": "dancing"}', b"\xff\xfe", b"[" * 100_000])
    def test_a_malformed_body_is_refused_and_changes_nothing(self, world, body):
        job = running(world)
        before = (world.store.job(job), world.store.tasks(live=False))
        answer = world.post_beat(job, body)
        assert answer.status_code in (400, 422)
        assert error(answer)
        assert (world.store.job(job), world.store.tasks(live=False)) == before


class TestCancel:
    def test_a_cancelled_job_is_told_to_stop_and_everything_of_it_goes(self, world):
        job = running(world)
        answer = world.cancel(job.slug)
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert world.heartbeat(job, state="running").json()["stop"] is True
        for _ in range(20):
            world.tick(1.0)
        assert world.manager.live() == ()
        assert world.tasks() == ()

    def test_by_number_and_by_name_the_one_that_lives(self, world):
        old = world.send_job(name="mine").json()
        assert world.cancel(old["id"]).status_code == 200
        new = world.send_job(name="mine").json()
        assert world.cancel("mine").json()["id"] == new["id"]

    def test_a_name_that_is_the_id_of_another_job_is_not_taken_for_it(self, world):
        first = world.send_job(name="mine").json()
        named = [world.send_job(name=name).json() for name in (first["id"], first["job"])]
        assert world.send_job(name=first["id"]).status_code == 409
        for text in (first["job"], first["id"]):
            assert StoreViews(world.store).find(text).key.id == first["id"]
        assert world.cancel(first["id"]).json()["id"] == first["id"]
        # Nor once it has ended.
        assert error(world.cancel(first["id"])) == f"job {first['id']} has ended already (cancelled)"
        assert [world.cancel(job["id"]).status_code for job in named] == [200, 200]

    def test_of_several_live_jobs_of_a_name_none_is_chosen(self, world):
        jobs = [world.submit(name="train") for _ in range(2)]
        answer = world.cancel("train")
        assert answer.status_code == 404
        assert error(answer).startswith("2 jobs are called 'train'; give one of ")
        assert all(not world.store.job(job).state.ended for job in jobs)

    def test_what_cannot_be_cancelled(self, world):
        job = running(world)
        assert world.cancel(job.slug, world.credentials.for_job(job)).status_code == 403
        answer = world.cancel("nobody")
        assert (answer.status_code, error(answer)[:24]) == (404, "there is no job 'nobody'")
        world.cancel(job.slug)
        again = world.cancel(job.slug)
        assert (again.status_code, error(again)) == (409, f"job {job.id} has ended already (cancelled)")


class TestStoreAway:
    def test_every_call_is_a_503_with_the_stores_words(self, world, monkeypatch):
        job = running(world)
        world.add_anchor()

        def full(*_: object, **__: object) -> None:
            raise StoreUnavailable("keeping it: the disk is full; free some space")

        for method in ("job", "find_jobs", "jobs", "next_job_id", "add_job", "change_job", "report_progress",
                       "add_runtime_plans", "last_slot_number"):  # fmt: skip
            monkeypatch.setattr(world.store, method, full)
        answers = [
            world.heartbeat(job),
            world.send_job(name="mine"),
            world.register(),
        ]
        for answer in answers:
            assert (answer.status_code, error(answer)) == (503, "keeping it: the disk is full; free some space")

    def test_a_database_that_breaks_in_the_middle_of_a_heartbeat_takes_it_when_it_is_sent_again(
        self, world, monkeypatch
    ):
        job = running(world)
        change_job = world.store.change_job

        def full(*_: object, **__: object) -> None:
            raise StoreUnavailable("the disk is full")

        monkeypatch.setattr(world.store, "change_job", full)
        said = {"state": "finished", "result": {"digest": "abc"}}
        assert world.heartbeat(job, **said).status_code == 503
        monkeypatch.setattr(world.store, "change_job", change_job)
        assert world.heartbeat(job, **said).status_code == 200
        assert (world.store.job(job).state, world.store.job(job).digest) == (JobState.FINISHED, "abc")


def test_health_needs_no_credential_and_says_no_more_than_it_must(world):
    answer = world.client.get("/v1/health").json()
    public = {"version", "cluster", "slot", "status", "problems", "last_tick_seconds", "listing_seconds"}
    assert set(answer) == public
    assert (answer["status"], answer["problems"], answer["last_tick_seconds"]) == ("ok", [], None)
    assert answer["slot"] is None
    world.health.failed("the disk is full\x1b[2J")
    world.now += 5
    answer = world.client.get("/v1/health").json()
    assert set(answer) == public
    assert answer["status"] == "degraded"
    assert answer["problems"] == ["the last tick failed; the daemon's log says why"]
    shown = {"Authorization": f"Bearer {world.credentials.for_submission()}"}
    answer = world.client.get("/v1/health", headers=shown).json()
    assert (answer["own"], answer["last_error"], answer["last_error_seconds"]) == (True, "the disk is full\\x1b[2J", 5)
    answer = world.client.get("/v1/health", headers={"Authorization": "Bearer other"}).json()
    assert set(answer) == {*public, "own"}
    assert not answer["own"]


def test_health_tells_of_ticks_that_do_not_come(world):
    health = Health(lambda: world.now, stuck_seconds=300.0)
    world.now += 299
    assert health.status().problems == ()
    world.now += 2
    assert health.status().problems == ("no tick was completed for 301 s",)


def test_idle_jobs_are_told_in_health_and_metrics(world):
    world.policy = GivesNothing()
    world.submit()
    world.tick()
    world.beat()
    world.health.completed(world.tick(1.0))
    world.health.completed(world.tick(40.0))
    answer = world.client.get("/v1/health").json()
    assert answer["slot"] == world.store.last_slot_number()
    (problem,) = answer["problems"]
    assert problem.startswith("1 job waiting for 40 s although there is room for every one of them: policy ")
    said = world.client.get("/metrics")
    assert said.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in said.text.splitlines() if not line.startswith("#"))
    assert float(lines["dl2d_idle_waiting_jobs"]) == 1
    assert float(lines["dl2d_idle_seconds"]) == 40
    assert float(lines["dl2d_ticks_total"]) == 2


def test_calls_of_the_resource_manager_are_among_the_metrics(world):
    found = CallStatistics(calls={"squeue": 7}, seconds={"squeue": 0.5}, last_minute=21, overloads=1)
    world.health.counts(lambda: found)
    lines = dict(line.rsplit(" ", 1) for line in world.client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines['dl2d_resource_manager_calls_total{call="squeue"}']) == 7
    assert float(lines['dl2d_resource_manager_call_seconds_total{call="squeue"}']) == 0.5
    assert float(lines["dl2d_resource_manager_overloads_total"]) == 1
    assert float(lines["dl2d_resource_manager_requests_last_minute"]) == 21


def test_what_is_not_there_is_json_too(world):
    answer = world.client.get("/v1/nothing")
    assert (answer.status_code, error(answer)) == (404, "Not Found")


def test_no_secret_reaches_the_log_an_error_or_a_recorded_slot(world):
    with capture_logs() as logs:
        registered = world.add_anchor()
        assert world.register().status_code == 200
        submitted = JobKey.from_slug(world.send_job(name="yours").json()["job"])
        said = [
            world.send_job(name="yours"),
            world.send_job("wrong"),
            world.register(proof="PROOF-OF-SOMEBODY"),
            world.heartbeat(submitted, "wrong"),
            world.heartbeat(submitted, state="dancing"),
            world.send_job(worker={"cpu": 99}),
        ]
        for key in (registered, submitted):
            world.heartbeat(key)
        world.settle()
    assert all(answer.status_code >= 400 for answer in said)
    secrets = {SECRET_OF_THE_USER, "PROOF-OF-SOMEBODY", world.credentials.for_submission()}
    for key in (registered, submitted):
        secrets |= {world.credentials.for_job(key), world.credentials.token(key)}
    slots = [world.store.slot(number) for number in range(1, world.store.last_slot_number() + 1)]
    assert slots
    texts = [repr(logs), repr(slots), *(answer.text for answer in said)]
    for secret in secrets:
        assert not any(secret in text for text in texts)


def test_no_secret_of_a_job_is_in_the_database(tmp_path):
    world = ApiWorld(url=f"sqlite:///{tmp_path}/dl2d.sqlite")
    try:
        job = JobKey.from_slug(world.send_job().json()["job"])
        world.settle()
        with sqlite3.connect(f"{tmp_path}/dl2d.sqlite") as database:
            dump = "\n".join(database.iterdump())
        database.close()
        assert job.slug in dump
        for secret in (world.credentials.for_job(job), world.credentials.token(job)):
            assert secret not in dump
    finally:
        world.close()


# Whatever a coordinator says: an answer, never a 500.

_words = st.one_of(
    st.sampled_from(["worker-0", "ps-0", "worker-1", "worker-99", "", "host:1"]), st.text(max_size=20), st.integers()
)
_numbers = st.one_of(
    st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=3), st.just(2**62), st.just(-1)
)
_members = st.lists(
    st.fixed_dictionaries(
        {
            "task": _words,
            "role": st.sampled_from(["worker", "ps", "cook"]),
            "state": st.sampled_from(["joined", "active", "draining", "left", "gone"]),
        },
        optional={"host": _words, "pid": _numbers},
    ),
    max_size=4,
)
_plans = st.lists(
    st.fixed_dictionaries(
        {"number": _numbers, "first_version": _numbers, "workers": _numbers, "servers": _numbers},
        optional={
            "added": st.lists(_words, max_size=2),
            "moved_bytes": _numbers,
            "prepare_ms": _numbers,
            "suspension_ms": st.one_of(st.none(), st.fixed_dictionaries({"p50": _numbers, "max": _numbers})),
        },
    ),
    max_size=3,
)
_beats = st.fixed_dictionaries(
    {"address": _words, "state": st.sampled_from(["waiting", "running", "running", "sleeping"])},
    optional={
        "incarnation": _words,
        "reason": st.one_of(st.none(), _words),
        "version": _numbers,
        "total_versions": _numbers,
        "epoch": _numbers,
        "epochs": _numbers,
        "loss": _numbers,
        "steps_per_second": _numbers,
        "members": st.one_of(_members, _words),
        "plan": _numbers,
        "plans": st.one_of(_plans, st.none()),
        "result": st.one_of(st.none(), st.fixed_dictionaries({"digest": _words, "versions": _numbers})),
        "new_in_the_next_version": _numbers,
    },
)


_MANY = 10_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": [{}] * _MANY},
        {"plans": [{}] * 100},
        {"plans": [{"number": 1, "added": [1] * _MANY}]},
        {"stragglers": [1] * _MANY},
        {"argv": [1] * _MANY, "cwd": "/"},
        {"argv": ["x"], "cwd": "/", "env": {f"a{number}": 1 for number in range(_MANY)}},
        {f"a{number}": 1 for number in range(_MANY)},
    ],
    ids=["members", "plans", "tasks of plans", "stragglers", "argv", "env", "unknown"],
)
def test_a_body_with_ten_thousand_errors_is_refused_at_the_first(world: ApiWorld, wrong: dict[str, object]) -> None:
    """Errors are made, logged and answered in the loop that takes all jobs' heartbeats."""
    with capture_logs() as logs:
        if wrong.keys() & {"members", "plans", "stragglers"}:
            answer = world.post_beat(running(world), {"address": "h:1", "state": "running", **wrong})
        else:
            answer = world.post("/v1/register", {"rm_id": "7", "proof": "x", **wrong})
    assert answer.status_code == 422
    assert len(answer.content) < 2000
    assert len(str(next(line for line in logs if line["event"] == "malformed request"))) < 2000


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ApiWorld, JobKey]]:
    world = ApiWorld(cluster_nodes=make_nodes(2))
    job = world.settled(max_workers=2, max_ps=1, worker=Resources.of(cpu=1))
    yield world, job
    world.close()


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(beat=_beats)
def test_no_heartbeat_breaks_the_daemon(shared, beat) -> None:
    world, job = shared
    answer = world.post_beat(job, beat)
    assert answer.status_code in (200, 422), (beat, answer.text)
    if answer.status_code == 200:
        assert answer.json()["members"] == ["worker-0", "worker-1", "ps-0"]
    else:
        assert error(answer).startswith("malformed request: ")
    assert all(task.state is TaskState.CONFIRMED for task in world.tasks(job))


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
_keys = st.sampled_from([*REQUEST, "name", "ps", "batch", "max_workers", "min_ps", "allowed_workers", "architecture"])


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(st.one_of(_keys, st.text(max_size=5)), _json, max_size=3), whole=st.one_of(st.none(), _json)
)
def test_no_submission_breaks_the_daemon(shared, changes, whole) -> None:
    world, _ = shared
    body = {"request": {**REQUEST, **changes}, **COMMAND} if whole is None else whole
    answer = world.post("/v1/jobs", body, world.credentials.for_submission())
    assert answer.status_code in (200, 409, 422), (body, answer.text)


@pytest.mark.parametrize(
    ("configured", "jobs", "silent_seconds", "seconds"),
    [(2.0, 0, 60, 2.0), (2.0, 200, 60, 2.0), (2.0, 1000, 60, 10.0), (2.0, 1_000_000, 60, 20.0)],
)
def test_coordinators_of_many_jobs_send_heartbeats_less_often(
    configured: float, jobs: int, silent_seconds: float, seconds: float
) -> None:
    assert heartbeat_interval(configured, jobs, silent_seconds) == seconds


class TestContainers:
    """Reports of containers, where the resource manager gives out tasks by them."""

    def report(self, world: ApiWorld, key: JobKey, *, credential: str | None = None, **more: object) -> httpx2.Response:
        shown = world.credentials.for_job(key) if credential is None else credential
        body = {"role": "worker", "position": 0, "container": "container_1_0001_01_000003", "incarnation": "a" * 32}
        return world.post(f"/v1/jobs/{key.slug}/containers", {**body, "node": "n:1", **more}, shown)

    def test_other_managers_start_each_task_themselves(self, world: ApiWorld) -> None:
        answer = self.report(world, running(world))
        assert (answer.status_code, "starts each task itself" in error(answer)) == (409, True)

    def test_a_container_gets_the_command_of_its_task(self, world: ApiWorld) -> None:
        key = running(world)
        manager = GivesOut()
        world.access.manager = manager
        manager.task = "worker-1"
        task = self.report(world, key).json()["task"]
        assert (task["id"], task["cwd"], task["argv"][0]) == ("worker-1", "/home/ann", "dl2-run")
        assert task["env"]["DL2_TOKEN"] == world.credentials.token(key)
        assert task["env"]["DL2_TASK"] == "worker-1"
        manager.task = "anchor"
        assert self.report(world, key).json()["task"]["env"]["DL2_ROLE"] == "coordinator"
        manager.task = "worker-99"
        assert self.report(world, key).json()["task"] is None
        manager.task = ""
        manager.grace = 2.5
        assert self.report(world, key, task="worker-1").json() == {
            "task": None, "grace": 2.5, "again": False, "report_seconds": 3.0
        }  # fmt: skip
        assert (manager.seen[-1].job, manager.seen[-1].task, manager.seen[-1].exit_code) == (key, "worker-1", None)

    @pytest.mark.parametrize("role", list(Role))
    def test_a_task_that_dl2d_has_not_given_out_reaches_no_manager(self, world: ApiWorld, role: Role) -> None:
        key = running(world)
        world.access.manager = manager = GivesOut()
        for task in {"worker-0", "ps-0", "anchor", "worker-99", "x"} - {f"{role.value}-0"}:
            if (role, task) != (Role.COORDINATOR, "anchor"):
                assert self.report(world, key, role=role.value, task=task).status_code == 409
        assert manager.seen == []
        own = "anchor" if role is Role.COORDINATOR else f"{role.value}-0"
        assert self.report(world, key, role=role.value, task=own).status_code == 200

    def test_reports_of_unknown_tasks_are_logged_not_each_time(self, request) -> None:
        world = ApiWorld(beat_burst=250.0)
        request.addfinalizer(world.close)
        key = running(world)
        world.access.manager = GivesOut()
        with capture_logs() as logs:
            answers = [self.report(world, key, task=f"worker-{number}").status_code for number in (77, 78, 79)]
        assert answers == [409, 409, 409]
        assert [entry["task"] for entry in logs if entry["event"] == "unknown task"] == ["worker-77"]

    def test_reports_of_a_job_are_limited_by_its_size_and_leave_heartbeats_alone(self) -> None:
        world = ApiWorld(beat_burst=5.0)
        try:
            key, large = running(world), world.submit(max_workers=80, max_ps=20)
            world.access.manager = GivesOut()
            for job, reports in ((key, 5), (large, 50)):
                answers = [self.report(world, job).status_code for _ in range(reports + 2)]
                assert answers == [200] * reports + [429] * 2
            assert world.post_beat(key, {}).status_code != 429
            world.now += 1.0
            assert self.report(world, key).status_code == 200
        finally:
            world.close()

    def test_a_task_that_waits_for_a_coordinator_that_has_moved_begins_again(self, world: ApiWorld) -> None:
        key = running(world)
        world.access.manager = manager = GivesOut()
        address = world.job(key).address
        joined = next(iter(world.tasks(key))).id
        (late,) = world.store.ask_tasks([Start(key, Role.WORKER, "n1", Resources.of(cpu=1))], world.now)

        def again(task: str, **more: object) -> bool:
            return self.report(world, key, task=task, **more).json()["again"]

        assert not again(late.id, coordinator=address)
        assert not again(late.id)
        assert again(late.id, coordinator="n7:1")
        # It is asked to end; its container ends; the task has joined.
        manager.grace = 2.5
        assert not again(late.id, coordinator="n7:1")
        manager.grace = None
        assert not again(late.id, coordinator="n7:1", ending=True)
        assert not again(joined, coordinator="n7:1")
        # The same if it has given up by itself: no end of it is noted.
        assert not again(late.id, coordinator="n7:1", exit_code=1)
        assert (manager.seen[-1].task, manager.seen[-1].exit_code) == ("", None)
        again(late.id, coordinator=address, exit_code=1)
        assert (manager.seen[-1].task, manager.seen[-1].exit_code) == (late.id, 1)
        world.now += 3600
        again(late.id, coordinator=address, exit_code=1)
        assert (manager.seen[-1].task, manager.seen[-1].exit_code) == ("", None)
        again(late.id, coordinator=address, exit_code=0)
        assert manager.seen[-1].task == late.id

    def test_only_the_job_itself_may_ask(self, world: ApiWorld) -> None:
        key = running(world)
        world.access.manager = GivesOut()
        assert self.report(world, key, credential="wrong").status_code == 403
        assert self.report(world, key._replace(id="999")).status_code == 404
        for bad in ({"incarnation": "x"}, {"role": "king"}, {"position": -1}, {"container": "a/b"}, {"more": 1}):
            assert self.report(world, key, **bad).status_code == 422

    def test_an_end_asks_for_a_tick_but_not_at_any_rate(self, world: ApiWorld) -> None:
        key = running(world)
        world.access.manager = GivesOut()
        woken = world.woken
        self.report(world, key, task="worker-1")
        assert world.woken == woken
        self.report(world, key, task="worker-1", exit_code=-9)
        assert world.woken == woken + 1
        for _ in range(5):
            assert self.report(world, key, ending=True).status_code == 200
        assert world.woken == woken + 2


class GivesOut(MemoryManager):
    """A manager that gives a container one task."""

    def __init__(self) -> None:
        super().__init__([], lambda: 0.0)
        self.task = ""
        self.grace: float | None = None
        self.seen: list[ContainerReport] = []

    def report_container(self, report: ContainerReport) -> ContainerOrder:
        self.seen.append(report)
        return ContainerOrder(3.0, self.task, self.grace)

    def allow_changes(self, seconds: float) -> None:
        pass
