"""Random schedules of joins, leaves and deaths, in one process: nothing is lost or applied twice, no bit differs."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from regression import segments
from rehearsal import QUICK, Event, Rehearsal, job, random_events, static_digest
from weather import cut_data, cut_lines, rough_weather

from pslite.coordinator import Coordinator
from pslite.coordinator.admission import Admission
from pslite.coordinator.losses import Losses
from pslite.coordinator.planner import Planner
from pslite.coordinator.record import Record
from pslite.coordinator.rollback import Rollback
from pslite.coordinator.takeovers import Takeovers
from pslite.errors import PeerLost, Unreachable
from pslite.job.spec import LAMB, Adam
from pslite.net.data_frames import INIT, RESTORE, Link
from pslite.net.framing import cut_off
from pslite.net.messages import Abort, Commit, DigestRequest, Exit, Nack, PlanDone, Promote, TakeOver
from pslite.net.server_connections import ServerConnections
from pslite.replicas import Guards
from pslite.server import Server, _Stage
from pslite.worker import Worker

#: of each kind; 10,000 in all are gone through by setting it so
SCHEDULES = int(os.environ.get("PSLITE_SCHEDULES", "8"))
FIRST = int(os.environ.get("PSLITE_FIRST_SCHEDULE", "0"))

#: a member that dies unseen while there is no coordinator is given up so many seconds later
BRIEF = replace(QUICK, lease=6.0, verdict=1.0)
#: and one whose connection breaks has a second to come back
PATIENT = replace(BRIEF, verdict=10.0)

JOBS = {
    "plain": {},
    "fewer shards than workers": {"shards": 3},
    "clipped": {"clip_norm": 0.5, "segments": segments(40, Adam(lr=0.01))},
    "lamb": {"segments": segments(40, LAMB(lr=0.01))},
    "halves": {"wire": "bfloat16"},
    "encrypted": {},  # over TCP, and all of it
}
#: deaths from here on may hit the one that writes files, when the others' scripts have ended
LATE = 57
BEFORE_ITS_FILES = "before it had written what the script saves at its end"


@pytest.fixture(autouse=True)
def _tcp_if_encrypted(request, monkeypatch):
    if "seed" in request.fixturenames and kind_of(request.getfixturevalue("seed")) == "encrypted":
        monkeypatch.setenv("DL2_TRANSPORT", "tcp")


@cache
def expected(kind):
    return static_digest(job(**JOBS[kind]))


def go_through(seed, kind, kills, *, goes_back=True, **changes):
    """A schedule that ends with the bits of an undisturbed job; without `goes_back` no step is done twice."""
    outcome, story = rehearse(seed, kind, kills, **changes)
    assert outcome.status.result.digest == expected(kind), story
    assert goes_back or not any("goes back" in line for line in outcome.log), story


def rehearse(seed, kind, kills, *, workers=4, any_worker=False, settings=None, first=1, last=45, also=None, **changes):
    """Go through a schedule that must end well; every version counts itself, so that none is lost or done twice."""
    rng = random.Random(seed)
    # where replicas are needed one may die, and two are left
    least = 3 if "ps" in (*kills, also) and changes.get("durability") == "durable" else 1
    events = random_events(rng, first=first, last=last, kills=kills, least_servers=least, most_workers=workers)
    workers, servers = rng.randint(1, workers), rng.randint(least, 4)
    if also is not None:
        at = next(event.version for event in reversed(events) if event.kill is not None)
        events.append(Event(at, kill=also, choice=rng.randrange(12), delay=rng.random() * 0.03))
    spec = job(**JOBS[kind], **changes)
    encrypt = "all" if kind == "encrypted" else "control"
    settings = settings or (QUICK if "coordinator" not in kills else BRIEF)
    outcome = Rehearsal(
        spec, workers=workers, servers=servers, events=events, settings=settings, encrypt=encrypt, any_worker=any_worker
    ).run()
    sizes = f"seed {seed}, {kind}: {workers} workers, {servers} servers"
    story = "\n".join([sizes, *map(str, events), *outcome.log, *outcome.surprises])
    if not (first >= LATE and BEFORE_ITS_FILES in str(outcome.status.reason)):
        assert outcome.status.state == "finished", story
        assert not outcome.surprises, story
    assert outcome.status.version == spec.total_versions, story
    return outcome, story


def kind_of(seed):
    return list(JOBS)[seed % len(JOBS)]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_resizes_and_deaths_of_workers(seed):
    go_through(seed, kind_of(seed), ["worker"] * random.Random(seed).randint(0, 2), goes_back=False)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_resizes_of_durable_jobs(seed):
    go_through(seed, kind_of(seed), [], durability="durable", goes_back=False)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2 * SCHEDULES))
def test_deaths_of_servers_that_have_replicas(seed):
    rng = random.Random(seed)
    kills = [*["ps"] * rng.randint(1, 2), *["worker"] * rng.randint(0, 1)]
    go_through(seed, kind_of(seed), kills, durability="durable", goes_back=False)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_frames_in_pieces_late_and_twice(seed, monkeypatch):
    rough_weather(monkeypatch, seed)
    kills = [["ps", "worker"], ["worker"], []][seed % 3]
    go_through(seed, kind_of(seed), kills, durability="durable", goes_back=False)


WAYS = [{}, {"durability": "durable"}, {"update": "worker"}]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2 * SCHEDULES))
def test_data_connections_that_break_are_opened_again(seed, monkeypatch):
    if seed % 3 == 2:
        rough_weather(monkeypatch, seed)
    broken = cut_data(monkeypatch, seed, often=0.01)
    rng = random.Random(seed)
    way = rng.choice(WAYS)
    kills = ["worker"] * rng.randint(0, 1) + ["ps"] * (rng.randint(0, 1) if "update" in way else 0)
    go_through(seed, kind_of(seed), kills, settings=PATIENT, **way)
    assert broken


def some_deaths(seed):
    rng = random.Random(seed)
    return [*["ps"] * rng.randint(1, 3), *["worker"] * rng.randint(0, 1)]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_deaths_of_servers_that_only_add_up(seed):
    go_through(seed, kind_of(seed), some_deaths(seed), update="worker")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
@pytest.mark.parametrize("checkpoints", [False, True])
def test_deaths_of_servers_without_replicas(seed, checkpoints, tmp_path):
    kept = {"checkpoint": str(tmp_path), "checkpoint_every": 7} if checkpoints else {}
    go_through(seed, kind_of(seed), some_deaths(seed), **kept)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
@pytest.mark.parametrize("durability", ["none", "durable"])
def test_deaths_of_the_last_worker(seed, durability):
    kills = ["worker"] * random.Random(seed).randint(1, 2)
    go_through(seed, kind_of(seed), kills, workers=2, any_worker=True, durability=durability)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_deaths_of_the_last_worker_and_of_a_server(seed):
    """At the same version, half of the time."""
    rng, kind = random.Random(seed), kind_of(seed)
    changes = {"workers": 2, "any_worker": True, "durability": "durable", "settings": BRIEF}
    if rng.random() < 0.5:
        go_through(seed, kind, ["ps"] + ["worker"] * rng.randint(1, 2), **changes)
    else:
        go_through(seed, kind, ["worker", "worker"], also="ps", **changes)


def test_a_job_that_goes_back_again_and_again_fails(monkeypatch):
    monkeypatch.setattr("pslite.coordinator.rollback.MAX_ROLLBACKS", 1)
    outcome = Rehearsal(job(), workers=2, servers=2, events=[Event(9, kill="ps"), Event(20, kill="ps")]).run()
    assert outcome.status.state == "failed", outcome.story
    assert "gone back 1 times without a newer checkpoint" in outcome.status.reason


def test_a_block_whose_owner_and_replica_die_together_goes_back_to_the_checkpoint(tmp_path):
    spec = job(durability="durable", checkpoint=str(tmp_path), checkpoint_every=10, resume=False)
    rehearsal = Rehearsal(spec, workers=2, servers=3)
    begin_step = rehearsal._begin_step

    def kill_two(task, version):
        begin_step(task, version)
        if version == 25 and not rehearsal._killed:
            kill(rehearsal, "ps-0")
            kill(rehearsal, "ps-1")

    rehearsal._begin_step = kill_two
    outcome = rehearsal.run()
    assert any(re.search("goes back to its checkpoint of version [12]0", line) for line in outcome.log), outcome.story
    assert any(re.search("goes on from its checkpoint of version [12]0", line) for line in outcome.log), outcome.story
    outcome.check(expected("plain"))


def test_who_was_to_leave_is_let_go_where_the_job_goes_back(monkeypatch):
    """The worker that was to stay dies; the other one is left behind."""
    rehearsal = Rehearsal(job(), workers=2, servers=2, events=[Event(10, workers=1)])
    commit = Planner.commit

    def commit_and_kill(planner, pending):
        commit(planner, pending)
        if pending.plan.number == 2:
            kill(rehearsal, "worker-0")

    monkeypatch.setattr(Planner, "commit", commit_and_kill)
    outcome = rehearsal.run()
    outcome.check(expected("plain"))
    assert [m.state for m in outcome.status.members if m.task == "worker-1"] == ["left"], outcome.story


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2 * SCHEDULES))
def test_deaths_of_the_coordinator(seed):
    rng = random.Random(seed)
    kills = ["coordinator"] * rng.randint(1, 4)
    changes = rng.choice([{}, {"durability": "durable"}, {"update": "worker"}])
    kills += ["worker"] * rng.randint(0, 1 if changes else 2)
    kills += ["ps"] * rng.randint(0, 2 if changes else 0)
    go_through(seed, kind_of(seed), kills, **changes)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2 * SCHEDULES))
def test_deaths_as_the_job_ends(seed):
    rng = random.Random(seed)
    kills = ["ps"] * rng.randint(0, 2) + ["worker"] * rng.randint(0, 1) + ["coordinator"] * rng.choice((0, 0, 1))
    kind, way = kind_of(seed), rng.choice(WAYS)
    outcome, story = rehearse(seed, kind, kills, settings=BRIEF, first=LATE, last=60, **way)
    assert outcome.status.result is None or outcome.status.result.digest == expected(kind), story


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_deaths_of_coordinators_and_servers_on_a_bad_network(seed, monkeypatch):
    rough_weather(monkeypatch, seed)
    rng = random.Random(seed)
    kills = ["coordinator"] * rng.randint(1, 3) + ["ps"] * rng.randint(1, 2) + ["worker"] * rng.randint(0, 1)
    settings = rng.choice([BRIEF, PATIENT])
    if settings is PATIENT:
        cut_lines(monkeypatch, seed, often=0.02)
    go_through(seed, kind_of(seed), kills, settings=settings, **rng.choice(WAYS))


def test_newcomers_are_not_blamed_for_a_server_that_nobody_knows_to_be_dead(monkeypatch):
    """It died with the coordinator, whose follower gives it its lease; somebody else has its port, and refuses them."""
    events = [Event(20, kill="coordinator"), Event(20, kill="ps"), Event(20, workers=3, delay=0.1)]
    rehearsal = Rehearsal(job(), workers=1, servers=1, events=events, settings=BRIEF)
    reach = ServerConnections.reach

    def refused(dialer, member, *rest):
        if member.task in rehearsal._killed:
            raise Unreachable(member.task, "wrong token")
        reach(dialer, member, *rest)

    monkeypatch.setattr(ServerConnections, "reach", refused)
    outcome = rehearsal.run()
    assert "wrong token" in outcome.story
    outcome.check()


def test_who_wakes_late_knows_of_a_plan_before_its_frames(monkeypatch):
    pump = Worker._pump

    class Slow(ServerConnections):
        def reach(self, *whom):
            super().reach(*whom)
            time.sleep(0.05)  # the connection is there, the plan is not

    def late(worker, done):
        select = worker._selector.select

        def oversleep(seconds):
            if worker._links and not worker._stages and worker._identity.task != "worker-0":
                time.sleep(0.3)
            return select(seconds)

        worker._selector.select = oversleep
        pump(worker, done)
        worker._selector.select = select

    monkeypatch.setattr("pslite.worker.ServerConnections", Slow)
    monkeypatch.setattr(Worker, "_pump", late)
    outcome = Rehearsal(job(epochs=2), workers=3, servers=1).run()
    outcome.check()


FIRST_PLANS = {
    "none": {},
    "durable": {"durability": "durable"},
    "clipped": {"clip_norm": 0.5},
    "async": {"mode": "async"},
    "only adds up": {"update": "worker"},
}


@pytest.mark.parametrize("after", [0, 1, 3, 8])
@pytest.mark.parametrize("how", FIRST_PLANS)
@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_dies_as_the_job_begins(after, how, servers, monkeypatch):
    """It has had so many blocks of the first weights, or gradients; nothing is lost with it."""
    spec = job(**FIRST_PLANS[how])
    rehearsal = Rehearsal(spec, workers=3, servers=servers)
    dies_as_it_begins(rehearsal, monkeypatch, after)
    outcome = rehearsal.run()
    assert outcome.killed == ["ps-0"], outcome.story
    outcome.check()
    assert outcome.status.version == spec.total_versions, outcome.story
    if how != "async":
        assert outcome.status.result.digest == static_digest(spec), outcome.story


def dies_as_it_begins(rehearsal, monkeypatch, after):
    """Have the first server die when so many blocks of the first weights, or gradients, have come to it."""
    arrived, pushed, begin, count = Server.arrived, Server._pushed, Worker._send_first_weights, []

    def note(server):
        if server._identity.task == "ps-0":
            count.append(server)
            if len(count) == after and not rehearsal._killed:
                kill(rehearsal, "ps-0")

    def arrive(server, link, header):
        if header.kind in (INIT, RESTORE):
            note(server)
        arrived(server, link, header)

    def push(server, link, header):
        note(server)
        pushed(server, link, header)

    def begins(worker, *rest):
        if not after and not rehearsal._killed:
            kill(rehearsal, "ps-0")
        begin(worker, *rest)

    monkeypatch.setattr(Server, "arrived", arrive)
    monkeypatch.setattr(Server, "_pushed", push)
    monkeypatch.setattr(Worker, "_send_first_weights", begins)


def kill(rehearsal, task):
    """Have it die, and another one come in its place."""
    role = task.split("-")[0]
    # at once: a coordinator that asked in between would hear that nobody else is to come
    with rehearsal._lock:
        rehearsal._killed.append(task)
        rehearsal._targets[role].remove(task)
        rehearsal._members[task].sever()
        rehearsal._fit(oldest=False)
    rehearsal._wake()


ENDS = {how: FIRST_PLANS[how] for how in ("none", "durable", "async", "only adds up")}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_dies_before_it_has_said_how_the_job_ends(how, servers, monkeypatch):
    spec = job(**ENDS[how])
    rehearsal = Rehearsal(spec, workers=2, servers=servers)
    obey, finish, killed = Server._obey, Worker.finish, []

    def die():
        if not killed:
            killed.append("ps-0")
            kill(rehearsal, "ps-0")

    def hear(server, message):
        if isinstance(message, DigestRequest) and server._identity.task == "ps-0":
            die()
        else:
            obey(server, message)

    def end(worker):
        if how == "only adds up":
            die()  # it is asked for nothing at the end
        finish(worker)

    monkeypatch.setattr(Server, "_obey", hear)
    monkeypatch.setattr(Worker, "finish", end)
    outcome = rehearsal.run()
    assert outcome.killed == ["ps-0"], outcome.story
    outcome.check()
    if how != "async":
        assert outcome.status.result.digest == static_digest(spec), outcome.story


def test_a_server_that_dies_when_the_digest_is_known_is_needed_no_more(monkeypatch):
    rehearsal = Rehearsal(job(), workers=2, servers=1)
    train, obey, dead = rehearsal._regression.train, Server._obey, threading.Event()

    def save(worker, **how):
        train(worker, **how)
        if worker.is_chief:
            kill(rehearsal, "ps-0")
            dead.set()
            time.sleep(0.3)  # it writes its files

    def hear(server, message):
        if server._identity.task == "ps-0" and isinstance(message, Exit):
            assert dead.wait(20)  # it does not hear that it may go before it dies
        return obey(server, message)

    monkeypatch.setattr(Server, "_obey", hear)
    monkeypatch.setattr(rehearsal._regression, "train", save)
    outcome = rehearsal.run()
    assert outcome.killed == ["ps-0"], outcome.story
    outcome.check(expected("plain"))


@pytest.mark.parametrize("how", ENDS)
def test_who_writes_files_is_known_when_all_have_the_last_version(how, monkeypatch):
    """The first worker has pushed its last gradients, and dies: another one writes them."""
    spec = job(**ENDS[how])
    rehearsal = Rehearsal(spec, workers=3, servers=2)
    train, finish, chiefs = rehearsal._regression.train, Worker.finish, []

    def end(worker):
        if worker._identity.task == rehearsal._coordinator._record.plan.workers[0].task:
            rehearsal._killed.append(worker._identity.task)
            worker.sever()
        finish(worker)

    def save(worker, **how):
        train(worker, **how)
        if worker.is_chief:
            chiefs.append(worker._identity.task)

    monkeypatch.setattr(Worker, "finish", end)
    monkeypatch.setattr(rehearsal._regression, "train", save)
    outcome = rehearsal.run()
    outcome.check()
    assert len(outcome.killed) == 1, outcome.story
    assert len(chiefs) == 1, (chiefs, outcome.story)
    assert chiefs[0] not in outcome.killed, outcome.story
    if how != "async":
        assert outcome.status.result.digest == static_digest(spec), outcome.story


def test_the_first_plan_may_be_given_up(monkeypatch):
    make_ready = Worker._make_ready

    def refuse_once(worker, message):
        if message.plan.number == 1:
            worker._send(Nack(plan=1, reason="not now"))
        else:
            make_ready(worker, message)

    monkeypatch.setattr(Worker, "_make_ready", refuse_once)
    rehearsal = Rehearsal(job(), workers=1, servers=2)
    monkeypatch.setattr(Planner, "give_up", lambda self, reason, unfit: self.abort(self._record.pending, reason))
    outcome = rehearsal.run()
    assert any(line.startswith("plan 1 is given up") for line in outcome.log), outcome.log
    assert outcome.status.state == "finished", (outcome.status.reason, outcome.log)
    assert outcome.status.result.digest == expected("plain")


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_dies_as_the_job_goes_on_from_a_checkpoint(after, servers, monkeypatch, tmp_path):
    """What its optimizer kept is there."""
    spec = job(checkpoint=str(tmp_path), checkpoint_every=10)
    undisturbed = static_digest(job())
    Rehearsal(job(checkpoint=str(tmp_path), checkpoint_every=10, epochs=5), workers=2, servers=2).run()
    rehearsal = Rehearsal(spec, workers=2, servers=servers)
    dies_as_it_begins(rehearsal, monkeypatch, after)
    outcome = rehearsal.run()
    assert outcome.killed == ["ps-0"], outcome.log
    assert any("goes on from its checkpoint" in line for line in outcome.log), outcome.log
    assert outcome.status.state == "finished", outcome.log
    assert outcome.status.result.digest == undisturbed, outcome.log


@pytest.mark.parametrize("how", ["none", "durable", "clipped"])
def test_the_first_worker_dies_before_it_is_known_that_servers_have_its_weights(how, monkeypatch):
    """As another coordinator may find it, to whom nobody has said so yet."""
    spec = job(**FIRST_PLANS[how])
    rehearsal = Rehearsal(spec, workers=3, servers=2)
    begin_step, begun, unknown = rehearsal._begin_step, Record.servers_have_begun, []

    def dies(task, version):
        if task == "worker-0" and version == 3 and not rehearsal._killed:
            kill(rehearsal, "worker-0")
        begin_step(task, version)

    def have_begun(record):
        if not unknown and "worker-0" in rehearsal._killed:
            unknown.append(record)
            return False
        return begun(record)

    def is_first(takeovers, member):
        return not takeovers._record.servers_have_begun()

    monkeypatch.setattr(rehearsal, "_begin_step", dies)
    monkeypatch.setattr(Record, "servers_have_begun", have_begun)
    monkeypatch.setattr(Takeovers, "_is_before_first_weights", is_first)
    outcome = rehearsal.run()
    assert unknown
    outcome.check(static_digest(spec))


def test_nobody_has_what_the_first_worker_has_not_sent(monkeypatch):
    rehearsal = Rehearsal(job(), workers=3, servers=2)
    begin = Worker._send_first_weights

    def dies(worker, *rest):
        if not rehearsal._killed:
            kill(rehearsal, worker._identity.task)
        begin(worker, *rest)

    monkeypatch.setattr(Worker, "_send_first_weights", dies)
    outcome = rehearsal.run()
    assert any("the job goes back to its beginning" in line for line in outcome.log), outcome.story
    outcome.check(expected("plain"))


def unreachable(monkeypatch, task):
    """Have no connection to a server be opened again."""
    again = ServerConnections.again

    def hardly(dialer, member, *rest):
        if member.task != task:
            again(dialer, member, *rest)

    monkeypatch.setattr(ServerConnections, "again", hardly)
    monkeypatch.setattr("pslite.server._BROKEN_SECONDS", 0.1)


def test_a_worker_that_cannot_reach_a_server_any_more_is_done_without(monkeypatch):
    unreachable(monkeypatch, "ps-0")
    rehearsal = Rehearsal(job(), workers=3, servers=2)
    begin_step = rehearsal._begin_step

    def cut(task, version):
        begin_step(task, version)
        if task == "worker-1" and version == 20:
            cut_off([rehearsal._members[task]._links["ps-0"].sock])

    monkeypatch.setattr(rehearsal, "_begin_step", cut)
    outcome = rehearsal.run()
    assert any("worker-1" in line and "cannot reach ps-0" in line for line in outcome.log), outcome.log
    assert outcome.status.state == "finished", outcome.log
    assert outcome.status.result.digest == expected("plain"), outcome.log
    assert {line.split(":")[0] for line in outcome.surprises} <= {"worker-1"}, outcome.surprises


def dies_before_it_answers_all(rehearsal, monkeypatch):
    """Have ps-1 die when all workers but the last have version 20 of a block; that one's task is in the list then."""
    send, behind = Server._send_weights, []

    def die(server, link, header, *rest):
        last = server._stages[header.plan].plan.workers[-1].task
        if server._identity.task == "ps-1" and header.version == 20 and link.task == last and not behind:
            for other in server._links.values():
                other.flush()
            behind.append(last)
            kill(rehearsal, "ps-1")
        send(server, link, header, *rest)

    monkeypatch.setattr(Server, "_send_weights", die)
    return behind


def test_who_is_behind_is_sent_what_was_lost_before_it_knew_whose_it_is(monkeypatch):
    """A server dies that has answered the other worker; the answer of who takes its place is lost with a connection."""
    rehearsal = Rehearsal(job(durability="durable"), workers=2, servers=3)
    take_on, hear, resume = Server._take_on, Worker._hear, Worker._resume
    behind, reopened = dies_before_it_answers_all(rehearsal, monkeypatch), threading.Event()

    def lose(server, holding, *rest):
        if behind and not reopened.is_set():
            cut_off([link.sock for link in server._links.values() if link.task in behind])
        take_on(server, holding, *rest)

    def again(worker, server):
        resume(worker, server)
        if worker._identity.task in behind and worker.version == 19:
            reopened.set()

    def late(worker, message):
        if isinstance(message, Promote) and worker._identity.task in behind:
            reopened.wait(5.0)
        hear(worker, message)

    monkeypatch.setattr(Server, "_take_on", lose)
    monkeypatch.setattr(Worker, "_resume", again)
    monkeypatch.setattr(Worker, "_hear", late)
    outcome = rehearsal.run()
    assert reopened.is_set(), outcome.story
    outcome.check()


def lose_the_line_of(rehearsal, task):
    """Have its control connection break as the coordinator sees it; the member comes back by itself."""
    coordinator = rehearsal._coordinator
    for connection in [each for each in coordinator._connections if each.hello.task == task and each.member]:
        coordinator._disconnect(connection, "")


def lasting(**how):
    """A job whose members come back, as one whose coordinator keeps a log has them: within half a second."""
    rehearsal = Rehearsal(job(), settings=replace(QUICK, verdict=5.0), **how)
    rehearsal._mortal = True
    return rehearsal


class _Held:
    """A socket from which nothing more comes for a while."""

    def __init__(self, sock):
        self.sock, self.released = sock, False

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def recv_into(self, view):
        if not self.released:
            raise BlockingIOError
        return self.sock.recv_into(view)


def test_weights_that_are_half_here_do_not_come_into_what_another_server_has_sent_since(monkeypatch):
    """The leaving server is slow; the one that has its blocks now is asked again, for the connection to it broke."""
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    rehearsal = Rehearsal(job(), workers=2, servers=2, events=[Event(20, servers=1)])
    payload, have, hear, held, done = Worker.payload, Worker._have, Worker._hear, [], threading.Event()

    def hold(worker, link, header):
        view = payload(worker, link, header)
        first = 20 < header.version == header.first
        if first and link.task == "ps-1" and worker._identity.task == "worker-1" and not held:
            link.sock = _Held(link.sock)
            held.extend((link, header))
            cut_off([worker._links["ps-0"].sock])
        return view

    def release(worker, block):
        have(worker, block)
        if held and worker is rehearsal._members["worker-1"] and not done.is_set():
            link, header = held
            if (block, worker._awaited) == (header.block, header.version + 2):
                link.sock.released = True
                with contextlib.suppress(PeerLost):  # the server may have left
                    link.receive(worker)
                done.set()

    def outlast(worker, message):
        if held and isinstance(message, PlanDone) and worker is rehearsal._members["worker-1"]:
            assert done.wait(10.0)
        hear(worker, message)

    monkeypatch.setattr(Worker, "payload", hold)
    monkeypatch.setattr(Worker, "_have", release)
    monkeypatch.setattr(Worker, "_hear", outlast)
    outcome = rehearsal.run()
    assert done.is_set(), outcome.story
    outcome.check(expected("plain"))


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_newcomer_that_loses_its_connection_for_a_moment_is_waited_for(role, monkeypatch):
    """It is there, and its line breaks just as nobody else is left of its role."""
    rehearsal = lasting(workers=1, servers=1)
    begin_step, check, cuts = rehearsal._begin_step, Rollback.check, []

    def die(task, version):
        begin_step(task, version)
        if version == 20 and not rehearsal._killed:
            kill(rehearsal, f"{role}-0")

    def cut_and_check(rollback, now):
        record = rehearsal._coordinator._record
        if record.rollbacks and not cuts and f"{role}-1" in record.joined(role):
            cuts.append(f"{role}-1")
            lose_the_line_of(rehearsal, f"{role}-1")
        check(rollback, now)

    monkeypatch.setattr(rehearsal, "_begin_step", die)
    monkeypatch.setattr(Rollback, "check", cut_and_check)
    outcome = rehearsal.run()
    assert cuts == [f"{role}-1"], outcome.story
    outcome.check(expected("plain"))


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_the_first_plan_waits_for_who_loses_its_connection_for_a_moment(role, monkeypatch):
    """The other one of its role dies at the same time: it is not the last one, and what it trains is known."""
    rehearsal = lasting(workers=2, servers=2)
    consider, lose = Planner.consider, Losses.lose

    def consider_late(planner, now):
        record = rehearsal._coordinator._record
        if not rehearsal._killed and len(record.joined("worker")) == len(record.joined("ps")) == 2:
            kill(rehearsal, f"{role}-0")
        if record.members.get(f"{role}-0") and record.members[f"{role}-0"].state == "left":
            consider(planner, now)

    def lose_and_cut(losses, member, *rest, **how):
        lose_the_line_of(rehearsal, f"{role}-1")
        lose_the_line_of(rehearsal, f"{role}-2")
        lose(losses, member, *rest, **how)

    monkeypatch.setattr(Planner, "consider", consider_late)
    monkeypatch.setattr(Losses, "lose", lose_and_cut)
    outcome = rehearsal.run()
    assert outcome.killed == [f"{role}-0"], outcome.story
    outcome.check()


def test_who_said_something_before_it_looked_for_another_coordinator_may_come_back(monkeypatch):
    """The coordinator has stood still: what it reads next was said before members noticed."""
    rehearsal = lasting(workers=2, servers=1)
    rehearsal._settings = replace(rehearsal._settings, lease=2.0, verdict=0.0)
    begin_step, tick, hear = rehearsal._begin_step, Coordinator._tick, Losses.hear
    happened = []

    def stand_still_at_20(task, version):
        begin_step(task, version)
        if version == 20 and not happened:
            happened.append("stands still")

    def tick_late(coordinator):
        if happened == ["stands still"]:
            coordinator._ticked -= 1.0
            tick(coordinator)
            happened.append("lenient")
        tick(coordinator)
        if happened[-1:] == ["heard"]:
            lose_the_line_of(rehearsal, "worker-1")
            happened.append("lost")

    def note(losses, member):
        hear(losses, member)
        if happened[-1:] == ["lenient"] and member.task == "worker-1":
            happened.append("heard")

    monkeypatch.setattr(rehearsal, "_begin_step", stand_still_at_20)
    monkeypatch.setattr(Coordinator, "_tick", tick_late)
    monkeypatch.setattr(Losses, "hear", note)
    outcome = rehearsal.run()
    assert happened[-1:] == ["lost"], outcome.story
    outcome.check()


def test_a_barrier_waits_for_who_loses_its_connection_for_a_moment(monkeypatch):
    rehearsal = lasting(workers=2, servers=1)
    begin_step, meet, lost = rehearsal._begin_step, Admission.open_barrier, threading.Event()

    def meet_at_20(task, version):
        begin_step(task, version)
        if version == 20:
            assert task == "worker-0" or lost.wait(10.0)
            rehearsal._members[task].barrier()

    def lose(admission):
        members = rehearsal._coordinator._record.members
        if not lost.is_set() and "worker-0" in members and members["worker-0"].at_barrier:
            lose_the_line_of(rehearsal, "worker-1")
            meet(admission)
            lost.set()
        meet(admission)

    monkeypatch.setattr(rehearsal, "_begin_step", meet_at_20)
    monkeypatch.setattr(Admission, "open_barrier", lose)
    outcome = rehearsal.run()
    assert lost.is_set(), outcome.story
    outcome.check()


def test_nothing_comes_from_a_server_that_is_given_up_and_lives(monkeypatch):
    """A connection to it is opened again just as it is known to be given up."""
    rehearsal = Rehearsal(job(durability="durable"), workers=2, servers=3)
    read, receive, hand_in, follow = Server._read_control, Link.receive, Worker._hand_in, Worker._follow
    cuts, held = [], []

    def cut(link, receiver):
        mine = isinstance(receiver, Server) and receiver._identity.task == "ps-1" and link.task == "worker-1"
        if mine and receiver._version >= 20 and not cuts:
            cuts.append(receiver)
            cut_off([link.sock])
        return receive(link, receiver)

    def hold(worker, result):
        if isinstance(result, Link) and cuts and not held and result.task == "ps-1":
            held.append(result)
            cut_off([cuts[0]._control._line.channel.sock])
        else:
            hand_in(worker, result)

    def deaf(server):
        if server not in cuts or not held:
            read(server)
        elif rehearsal.over:
            server.sever()
            read(server)

    def then(worker, message):
        follow(worker, message)
        if worker._identity.task == "worker-1":
            hand_in(worker, held[0])

    monkeypatch.setattr(Server, "_read_control", deaf)
    monkeypatch.setattr(Link, "receive", cut)
    monkeypatch.setattr(Worker, "_hand_in", hold)
    monkeypatch.setattr(Worker, "_follow", then)
    outcome = rehearsal.run()
    assert held, outcome.story
    assert outcome.status.state == "finished", outcome.story


def test_a_server_that_another_one_cannot_reach_any_more_is_done_without(monkeypatch):
    monkeypatch.setattr("pslite.server._BROKEN_SECONDS", 0.1)
    rehearsal = Rehearsal(job(durability="durable"), workers=2, servers=3)
    begin_step, cut = rehearsal._begin_step, []

    def cut_one(task, version):
        begin_step(task, version)
        if version == 20 and not cut:
            cut.extend(list(rehearsal._members["ps-0"]._peers.values())[:1])
            cut_off([cut[0].sock])

    monkeypatch.setattr(rehearsal, "_begin_step", cut_one)
    outcome = rehearsal.run()
    assert any("cannot reach ps-" in line for line in outcome.log), outcome.log
    assert outcome.status.state == "finished", outcome.log
    assert outcome.status.result.digest == expected("plain"), outcome.log


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 6, 8])
def test_the_only_server_dies_when_it_has_said_which_plan_comes(milliseconds, monkeypatch):
    stamp_from = Server._stamp_from
    events = [Event(20, workers=1)]
    rehearsal = Rehearsal(job(), workers=3, servers=1, events=events)

    def stamp(server, first):
        stamp_from(server, first)
        if server._identity.task == "ps-0":
            threading.Timer(milliseconds / 1e3, rehearsal._happen, (Event(0, kill="ps"),)).start()

    monkeypatch.setattr(Server, "_stamp_from", stamp)
    outcome = rehearsal.run()
    assert outcome.killed == ["ps-0"], outcome.log
    outcome.check()


def test_a_dead_workers_part_is_done_whatever_becomes_of_a_server_that_leaves(monkeypatch):
    """It is to hear of the death, and says nothing more; meanwhile the plan that goes on without it is done."""
    enter, obey = Worker._enter, Server._obey
    rehearsal = Rehearsal(job(), workers=3, servers=2, events=[Event(10, servers=1, oldest=True)])

    def die(member):
        rehearsal._killed.append(member._identity.task)
        member.sever()

    def enter_and_die(worker, stage, version):
        if stage.plan.number == 2 and worker._identity.task == "worker-2":
            die(worker)
        enter(worker, stage, version)

    def hear_nothing(server, message):
        if server._identity.task == "ps-0" and isinstance(message, Exit):
            die(server)
        if server._identity.task != "ps-0" or not isinstance(message, TakeOver):
            obey(server, message)

    monkeypatch.setattr(Worker, "_enter", enter_and_die)
    monkeypatch.setattr(Server, "_obey", hear_nothing)
    outcome = rehearsal.run()
    assert sorted(outcome.killed) == ["ps-0", "worker-2"], outcome.log
    outcome.check(expected("plain"))


def test_connections_for_the_next_plan_outlast_the_end_of_the_one_before(monkeypatch):
    """Members hear at different times that a plan is done, and one is in the next already."""
    hear, read_control = Worker._hear, Server._read_control

    class Slow(ServerConnections):
        def reach(self, *whom):
            super().reach(*whom)
            time.sleep(0.15)

    def late(worker, message):
        if isinstance(message, PlanDone):
            threading.Timer(0.05, hear, (worker, message)).start()
        else:
            hear(worker, message)

    def seldom(server):
        if server._identity.task != "ps-0" or time.monotonic() - server._looked > 0.1:
            read_control(server)

    monkeypatch.setattr("pslite.worker.ServerConnections", Slow)
    monkeypatch.setattr(Worker, "_hear", late)
    monkeypatch.setattr(Server, "_read_control", seldom)
    events = [Event(0, workers=3, servers=2), Event(1, servers=3)]
    rehearsal = Rehearsal(job(epochs=30), workers=2, servers=1, events=events, step_seconds=0.01)
    outcome = rehearsal.run()
    outcome.check()


def test_two_plans_that_are_made_ready_at_a_time_share_connections_and_the_first_is_passed_over(monkeypatch):
    """A plan is given up while a server and a worker make it ready; the next one adds the same server."""
    server_ready, worker_ready, obey, hear = Server._make_ready, Worker._make_ready, Server._obey, Worker._hear
    opened, given_up, committed = threading.Event(), threading.Event(), threading.Event()
    here, threads, stale = threading.local(), [], []

    class Late(_Stage):
        def __init__(self, *of):
            super().__init__(*of)
            if here.late:
                opened.set()
                committed.wait(20)

    def server_prepares(server, message, *rest):
        here.late = message.plan.number == 2 and server._identity.task == "ps-0"
        if here.late:
            threads.append(threading.current_thread())
        server_ready(server, message, *rest)

    def worker_prepares(worker, message):
        if message.plan.number == 2 and worker._identity.task == "worker-0":
            opened.wait(20)
            worker._send(Nack(plan=2, reason="not now"))
            given_up.wait(20)
        worker_ready(worker, message)

    def obeys(server, message):
        obey(server, message)
        if server._identity.task == "ps-0" and isinstance(message, Commit):
            committed.set()
            threads[0].join()
            server._take_prepared()  # before anything moves

    def hears(worker, message):
        hear(worker, message)
        if worker._identity.task == "worker-0" and isinstance(message, Abort):
            given_up.set()

    def watch(kind, name):
        take = getattr(kind, name)

        def taking(member):
            take(member)
            if {2, 3} <= member._stages.keys():
                stale.append(member._identity.task)

        monkeypatch.setattr(kind, name, taking)

    monkeypatch.setattr("pslite.server._Stage", Late)
    monkeypatch.setattr(Server, "_make_ready", server_prepares)
    monkeypatch.setattr(Worker, "_make_ready", worker_prepares)
    monkeypatch.setattr(Server, "_obey", obeys)
    monkeypatch.setattr(Worker, "_hear", hears)
    watch(Server, "_take_prepared")
    watch(Worker, "_take_staged")
    rehearsal = Rehearsal(job(), workers=2, servers=1, events=[Event(5, servers=2)])
    begin_step = rehearsal._begin_step

    def begins_step(task, version):
        begin_step(task, version)
        if version == 9:
            committed.wait(20)

    monkeypatch.setattr(rehearsal, "_begin_step", begins_step)
    outcome = rehearsal.run()
    assert any(line.startswith("plan 3 done") for line in outcome.log), outcome.log
    outcome.check(expected("plain"))
    assert not stale


def test_a_backup_that_leaves_need_not_acknowledge_what_the_next_one_has(monkeypatch):
    told, may_plant, lost = Guards.told, Guards.may_plant, []

    def late(guards):
        return may_plant.fget(guards) and (bool(lost) or all(holding.plan == 1 for holding, _ in guards._due))

    def lose(guards, link, header):
        if link.task == "ps-2" and header.plan == 2:
            lost.append(header)  # it has gone with the plan before
            return None
        return told(guards, link, header)

    monkeypatch.setattr(Guards, "told", lose)
    # who comes in its place is sent the state later than it a sum
    monkeypatch.setattr(Guards, "may_plant", property(late))
    outcome = Rehearsal(job(durability="durable"), workers=2, servers=3, events=[Event(10, servers=2)]).run()
    assert lost, outcome.log
    outcome.check()


def test_a_plan_is_done_although_a_backup_to_come_is_gone(monkeypatch):
    """The state that was to be sent to it last of all is not, and nobody acknowledges anything."""
    plant, may_plant, gone, begun = Guards.plant, Guards.may_plant, [], []

    def late(guards):
        if any(holding.plan == 2 for holding, _ in guards._due):
            begun.append(time.monotonic())
            return time.monotonic() - begun[0] > 0.3
        return may_plant.fget(guards)

    def plant_if_there(guards, holding, task):
        if holding.plan == 2:
            gone.append(task)
            return
        plant(guards, holding, task)

    monkeypatch.setattr(Guards, "may_plant", property(late))
    monkeypatch.setattr(Guards, "plant", plant_if_there)
    spec = job(durability="durable", epochs=60)
    outcome = Rehearsal(spec, workers=2, servers=1, events=[Event(10, servers=2)], step_seconds=0.004).run()
    assert gone
    assert any(line.startswith("plan 2 done") for line in outcome.log), outcome.log
    assert outcome.status.state == "finished", outcome.log
