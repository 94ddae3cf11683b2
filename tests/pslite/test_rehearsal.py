"""Deaths, delays and lost messages at chosen moments of a job: it goes on, and no bit of its weights differs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rehearsal import (
    QUICK,
    Event,
    Fault,
    Outcome,
    Rehearsal,
    break_connection,
    break_this_connection,
    die,
    disconnect,
    drop,
    fail,
    flag,
    job,
    kill,
    sleep,
    static_digest,
    wait,
)
from sudden_death import cut_off
from variants import first, nightly

from pslite.coordinator.stall_detector import ProgressRule
from pslite.errors import PeerLost, Unreachable, UsageError
from pslite.failure_rate_limits import RateLimit
from pslite.fault_points import FaultPoint
from pslite.net.messages import Abort, AtBarrier, Commit, DigestRequest, Exit, PlanDone, Promote, Reassign
from pslite.net.reliable_channel import counts
from pslite.net.tensor_frames import INIT, PUSH, REPLICATED, RESTORE, STATE

#: a member that dies unseen while there is no coordinator is given up so many seconds later
BRIEF = replace(QUICK, lease=6.0, verdict=1.0)

FIRST_PLANS = {
    "none": {},
    "durable": {"durability": "durable"},
    "clipped": {"clip_norm": 0.5},
    "async": {"mode": "async"},
}
ENDS = {how: FIRST_PLANS[how] for how in ("none", "durable", "async")}


@dataclass(frozen=True)
class Scenario:
    """A job to which something happens at one moment, and what is expected of it beside its end and its digest."""

    faults: Sequence[Fault]
    workers: int = 2
    servers: int = 2
    events: Sequence[Event] = ()
    #: of the job
    spec: Mapping[str, Any] = field(default_factory=dict)
    #: of the rehearsal
    how: Mapping[str, Any] = field(default_factory=dict)
    #: who has died; a role where any of it may
    killed: Sequence[str] = ()
    #: patterns of lines that are said
    says: Sequence[str] = ()
    #: workers and servers that may end with an error
    fails: Sequence[str] = ()
    #: who has left
    left: Sequence[str] = ()
    #: workers and servers of the last plan
    sizes: tuple[int, int] | None = None

    def play(self, folder: Path) -> Outcome:
        """Go through it and check how it went."""
        spec = job(**self.spec, **({"checkpoint": str(folder)} if "checkpoint_every" in self.spec else {}))
        outcome = Rehearsal(
            spec, workers=self.workers, servers=self.servers, events=self.events, faults=self.faults, **self.how
        ).run()
        assert not outcome.idle, (outcome.idle, outcome.story)
        assert len(outcome.killed) == len(self.killed), outcome.story
        assert all(map(str.startswith, sorted(outcome.killed), sorted(self.killed))), outcome.story
        assert {line.split(":")[0] for line in outcome.surprises} <= set(self.fails), outcome.story
        outcome.surprises.clear()
        outcome.check(None if spec.mode != "exact" else static_digest(structs.replace(spec, checkpoint="")))
        assert outcome.status.version == spec.total_versions, outcome.story
        for pattern in self.says:
            assert any(re.search(pattern, line) for line in outcome.log), outcome.story
        last = outcome.status.plans[-1]
        assert self.sizes in (None, (last.workers, last.servers)), outcome.story
        for task in self.left:
            assert [m.state for m in outcome.status.members if m.task == task] == ["left"], outcome.story
        return outcome


def plan_is(number):
    return lambda moment: moment.subject.number == number


def is_a(*kinds):
    return lambda moment: isinstance(moment.subject, kinds)


def subject_is(number):
    return lambda moment: moment.subject == number


def is_first_worker(moment):
    return moment.task == moment.rehearsal.plan.workers[0].task


def says(words):
    """Whether the coordinator has said so."""
    return lambda moment: any(words in line for line in moment.rehearsal.log)


#: members come back within half a second, as where the coordinator keeps a log
LASTING = {"lasting": True, "settings": replace(QUICK, verdict=5.0)}
DURABLE = {"durability": "durable"}


def dies_as_it_begins(after):
    """Have the first server die when so many blocks of the first weights, or gradients, have come to it."""
    if not after:
        return [Fault(FaultPoint.FIRST_WEIGHTS, kill("ps-0"))]
    return [
        Fault(
            FaultPoint.FRAME, kill("ps-0"), task="ps-0", nth=after,
            when=lambda moment: moment.header.kind in (INIT, RESTORE, PUSH),
        )
    ]  # fmt: skip


AFTER = (0, 1, 3, 8)


@pytest.mark.parametrize(
    ("after", "how", "servers"),
    [
        # of each plan CI runs all moments once, half of them with one server
        ((after, how, servers) if (a + h) % 2 == s else nightly(after, how, servers))
        for (a, after), (h, how), (s, servers) in product(enumerate(AFTER), enumerate(FIRST_PLANS), enumerate((1, 3)))
    ],
)
def test_a_server_dies_as_the_job_begins(after, how, servers, tmp_path):
    """Nothing is lost with it."""
    Scenario(
        dies_as_it_begins(after), workers=3, servers=servers, spec=FIRST_PLANS[how], killed=["ps-0"]
    ).play(tmp_path)  # fmt: skip


@pytest.mark.parametrize(("after", "servers"), [(0, 1), (1, 2), (2, 1), nightly(0, 2), nightly(1, 1), nightly(2, 2)])
def test_a_server_dies_as_the_job_goes_on_from_a_checkpoint(after, servers, tmp_path):
    """What its optimizer kept is there."""
    kept = {"checkpoint_every": 10}
    Scenario([], spec={**kept, "epochs": 5}).play(tmp_path)
    Scenario(
        dies_as_it_begins(after), servers=servers, spec=kept, killed=["ps-0"], says=["goes on from its checkpoint"]
    ).play(tmp_path)


def dies_unheard(moment):
    """The digest of its blocks is asked for in vain."""
    moment.rehearsal.kill("ps-0")
    return True


@pytest.mark.parametrize(
    ("how", "servers"),
    [
        ((how, servers) if h % 2 == s else nightly(how, servers))
        for (h, how), (s, servers) in product(enumerate(ENDS), enumerate((1, 3)))
    ],
)
def test_a_server_dies_before_it_has_said_how_the_job_ends(how, servers, tmp_path):
    fault = Fault(FaultPoint.MESSAGE, dies_unheard, task="ps-0", when=is_a(DigestRequest))
    Scenario([fault], servers=servers, spec=ENDS[how], killed=["ps-0"]).play(tmp_path)


@pytest.mark.parametrize("how", ENDS)
def test_who_writes_files_is_known_when_all_have_the_last_version(how, tmp_path):
    """The first worker has pushed its last gradients, and dies: another one writes them."""
    faults = [Fault(FaultPoint.FINISH, die, when=is_first_worker)]
    outcome = Scenario(faults, workers=3, spec=ENDS[how], killed=["worker"]).play(tmp_path)
    assert len(outcome.chiefs) == 1, (outcome.chiefs, outcome.story)
    assert outcome.chiefs[0] not in outcome.killed, outcome.story


@pytest.mark.parametrize("how", ["none", "durable", "clipped"])
def test_the_first_worker_dies_before_it_is_known_that_servers_have_its_weights(how, tmp_path):
    """Nothing that must arrive has come from anybody since the plan has taken effect: connections hang."""

    def hangs(moment):
        return moment.subject in moment.rehearsal.plan.tasks() and counts(moment.about[1])

    faults = [
        Fault(FaultPoint.PLAN_COMMITTED, flag("hangs")),
        Fault(FaultPoint.COORDINATOR_MESSAGE, drop, after="hangs", until="given up", when=hangs, always=True),
        Fault("version", kill(), when=lambda moment: is_first_worker(moment) and moment.subject == 3),
        Fault(
            FaultPoint.TICK, [flag("given up"), lambda moment: disconnect(*moment.rehearsal.plan.tasks())(moment)],
            when=says("the job goes back to its beginning"),
        ),
    ]  # fmt: skip
    Scenario(faults, workers=3, spec=FIRST_PLANS[how], killed=["worker"]).play(tmp_path)


@pytest.mark.parametrize("milliseconds", first(2, (0, 4, 1, 2, 6, 8)))
def test_the_only_server_dies_when_it_has_said_which_plan_comes(milliseconds, tmp_path):
    def soon(moment):
        threading.Timer(milliseconds / 1e3, moment.rehearsal.happen, (Event(0, kill="ps"),)).start()

    Scenario(
        [Fault(FaultPoint.PLAN_ANNOUNCED, soon, task="ps-0")], workers=3, servers=1, events=[Event(20, workers=1)],
        killed=["ps-0"],
    ).play(tmp_path)  # fmt: skip


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_newcomer_that_loses_its_connection_for_a_moment_is_waited_for(role, tmp_path):
    """It is there, and its line breaks just as nobody else is left of its role."""
    goes_back, newcomer = says("the job goes back"), re.compile(rf"{role}-1 .*has joined")
    faults = [
        Fault("version", kill(f"{role}-0"), when=subject_is(20)),
        Fault(
            FaultPoint.TICK, disconnect(f"{role}-1"),
            when=lambda moment: goes_back(moment) and any(map(newcomer.match, moment.rehearsal.log)),
        ),
    ]  # fmt: skip
    Scenario(faults, workers=1, servers=1, how=LASTING, killed=[f"{role}-0"]).play(tmp_path)


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_the_first_plan_waits_for_who_loses_its_connection_for_a_moment(role, tmp_path):
    """The other one of its role dies at the same time: it is not the last one, and what it trains is known."""

    def all_are_there(moment):
        return sum("has joined" in line for line in moment.rehearsal.log) == 4

    def both(moment):
        kill(f"{role}-0")(moment)
        flag("dead")(moment)

    given_up = says("it is in no plan")
    faults = [
        Fault(FaultPoint.CONSIDER_PLAN, both, when=all_are_there),
        Fault(FaultPoint.CONSIDER_PLAN, drop, when=lambda moment: not given_up(moment), always=True),
        # until it is given up
        Fault(
            FaultPoint.TICK, disconnect(f"{role}-1", f"{role}-2"), after="dead", always=True,
            when=lambda moment: not given_up(moment),
        ),
    ]  # fmt: skip
    Scenario(faults, how=LASTING, killed=[f"{role}-0"]).play(tmp_path)


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


def test_weights_that_are_half_here_do_not_come_into_what_another_server_has_sent_since(monkeypatch, tmp_path):
    """The leaving server is slow; the one that has its blocks now is asked again, for the connection to it broke."""
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    held = []

    def hold(moment):
        moment.subject.sock = _Held(moment.subject.sock)
        held.extend(moment.about)

    def release(moment):
        link, _ = held
        link.sock.released = True
        with contextlib.suppress(PeerLost):  # the server may have left
            link.receive(moment.rehearsal.members["worker-1"]._plane.receiver)

    faults = [
        Fault(
            FaultPoint.PAYLOAD, [hold, break_connection("ps-0"), flag("held")], task="worker-1",
            when=lambda moment: 20 < moment.header.version == moment.header.first and moment.subject.task == "ps-1",
        ),
        Fault(
            FaultPoint.WEIGHTS_HERE, [release, flag("done")], task="worker-1", after="held",
            when=lambda moment: moment.about == (held[1].block, held[1].version + 2),
        ),
        Fault(FaultPoint.MESSAGE, wait("done", 10.0), task="worker-1", when=is_a(PlanDone), after="held"),
    ]  # fmt: skip
    Scenario(faults, events=[Event(20, servers=1)]).play(tmp_path)


def test_a_plan_is_done_although_a_backup_to_come_is_gone(tmp_path):
    """The state that was to be sent to it last of all is not, and nobody acknowledges anything."""
    begun = []

    def late(_):
        begun.append(time.monotonic())
        return time.monotonic() - begun[0] <= 0.3

    faults = [
        Fault(FaultPoint.REPLICA_DUE, late, when=subject_is(2), always=True),
        Fault(FaultPoint.SEND_REPLICA, drop, when=subject_is(2), always=True),
    ]
    Scenario(
        faults, servers=1, events=[Event(10, servers=2)], spec={**DURABLE, "epochs": 60}, how={"step_seconds": 0.004},
        says=["^plan 2 done"],
    ).play(tmp_path)  # fmt: skip


def last_is_behind(moment):
    """Whether the last worker of the plan is sent version 20 of a block by ps-1."""
    return moment.header.version == 20 and moment.subject.task == moment.rehearsal.plan.workers[-1].task


def flush_and_die(moment):
    for link in moment.rehearsal.connections["ps-1"]:
        if link.open:
            link.flush()
    moment.rehearsal.kill("ps-1")


def break_connections_to_the_last_worker(moment):
    last = moment.rehearsal.plan.workers[-1].task
    cut_off([link.sock for link in moment.rehearsal.connections[moment.task] if link.task == last and link.open])


def is_behind(moment):
    worker = moment.rehearsal.plan.workers[-1].task
    return moment.task == worker and moment.rehearsal.members[worker].version == 19


def seldom():
    """At most every tenth of a second."""
    looked = [0.0]

    def may_not(_):
        now = time.monotonic()
        if now - looked[0] <= 0.1:
            return True
        looked[0] = now
        return False

    return may_not


def no_link_but_one(moment):
    """Break the connection of ps-0 to one other server."""
    cut_off([next(link for (task, _), link in moment.rehearsal.opened.items() if task == "ps-0").sock])


def goes_when_the_job_is_over(moment):
    """Hear nothing of the coordinator until then."""
    if moment.rehearsal.over:
        moment.rehearsal.sever(moment.task)
    return not moment.rehearsal.over


REPLICATED_AGAIN = r"^plan [2-9] done .* 2 servers.*replicas of (\d+) of \1 blocks"
SCENARIOS = {
    "a block whose owner and replica die together goes back to the checkpoint": Scenario(
        [Fault("version", kill("ps-0", "ps-1"), when=subject_is(25))],
        servers=3,
        spec={**DURABLE, "checkpoint_every": 10, "resume": False},
        killed=["ps-0", "ps-1"],
        says=["goes back to its checkpoint of version [12]0", "goes on from its checkpoint of version [12]0"],
    ),
    "a newcomer takes over replicas and survives the next death": Scenario(
        [
            Fault("version", kill("ps-0"), when=subject_is(10)),
            Fault(
                "version", kill("ps-1"),
                when=lambda moment: any(map(re.compile(REPLICATED_AGAIN).search, moment.rehearsal.log)),
            ),
        ],
        spec={**DURABLE, "epochs": 20},
        killed=["ps-0", "ps-1"],
        says=[REPLICATED_AGAIN],
    ),
    "a newcomer takes the place of a dead worker": Scenario(
        [Fault("version", kill("worker-0"), when=subject_is(20))],
        servers=1,
        spec={"epochs": 20},
        killed=["worker-0"],
        sizes=(2, 1),
    ),
    "in fast mode one other does all of a dead worker's part": Scenario(
        [Fault("version", die, task="worker-1", when=subject_is(20))],
        workers=3,
        servers=1,
        spec={"mode": "fast"},
        killed=["worker-1"],
    ),
    # the worker that was to stay dies; the other one is left behind
    "who was to leave is let go where the job goes back": Scenario(
        [Fault(FaultPoint.PLAN_COMMITTED, kill("worker-0"), when=plan_is(2))],
        events=[Event(10, workers=1)],
        killed=["worker-0"],
        left=["worker-1"],
    ),
    # it died with the coordinator, whose follower gives it its lease; somebody else has its port, and refuses them
    "newcomers are not blamed for a server that nobody knows to be dead": Scenario(
        [
            Fault("version", [kill("ps-0"), flag("dead")], when=subject_is(20)),
            Fault(
                FaultPoint.CONNECT, fail(Unreachable("ps-0", "wrong token")), after="dead", always=True,
                when=lambda moment: moment.subject.task == "ps-0",
            ),
        ],
        workers=1,
        servers=1,
        events=[Event(20, kill="coordinator"), Event(20, workers=3, delay=0.1)],
        how={"settings": BRIEF},
        killed=["ps-0"],
        says=["wrong token"],
    ),
    "who wakes late knows of a plan before its frames": Scenario(
        [
            # the connection is there, the plan is not
            Fault(FaultPoint.PREPARED, sleep(0.05), task="worker-1", always=True),
            Fault(FaultPoint.CONNECTION_OPENED, flag("connected"), task="worker-1"),
            Fault(FaultPoint.WAIT, sleep(0.3), task="worker-1", after="connected", until="staged", always=True),
            Fault(FaultPoint.PLAN_KNOWN, flag("staged"), task="worker-1"),
        ],
        workers=3,
        servers=1,
        spec={"epochs": 2},
    ),
    "a server that dies when the digest is known is needed no more": Scenario(
        [
            # it dies before it takes the message that it may go
            Fault(FaultPoint.MESSAGE, [flag("may go"), wait("dead")], task="ps-0", when=is_a(Exit)),
            # while the first worker writes its files
            Fault(
                "script ended", [wait("may go"), kill("ps-0"), flag("dead"), sleep(0.3)],
                when=lambda moment: moment.subject,
            ),
        ],
        servers=1,
        killed=["ps-0"],
    ),
    "the first plan may be given up": Scenario(
        [Fault(FaultPoint.PREPARE, fail(UsageError("not now")), task="worker-1", when=plan_is(1))],
        says=["^plan 1 is given up.*not now"],
        fails=["worker-1"],
    ),
    "nobody has what the first worker has not sent": Scenario(
        [Fault(FaultPoint.FIRST_WEIGHTS, kill())],
        workers=3,
        killed=["worker"],
        says=["the job goes back to its beginning"],
    ),
    "a worker that cannot reach a server any more is done without": Scenario(
        [
            Fault(FaultPoint.RECONNECT, drop, always=True, when=lambda moment: moment.subject.task == "ps-0"),
            Fault("version", break_connection("ps-0"), task="worker-1", when=subject_is(20)),
        ],
        workers=3,
        says=["worker-1.*cannot reach ps-0"],
        fails=["worker-1"],
    ),
    "a server that another one cannot reach any more is done without": Scenario(
        [Fault("version", no_link_but_one, when=subject_is(20))],
        servers=3,
        spec=DURABLE,
        says=["cannot reach ps-"],
        fails=["ps-0", "ps-1", "ps-2"],
    ),
    # a server dies that has answered the other worker; the answer of who takes its place is lost with a connection
    "who is behind is sent what was lost before it knew whose it is": Scenario(
        [
            Fault(FaultPoint.SEND_WEIGHTS, [flush_and_die, flag("behind")], task="ps-1", when=last_is_behind),
            Fault(
                FaultPoint.TAKE_BLOCK, break_connections_to_the_last_worker, after="behind", until="reopened",
                always=True,
            ),
            Fault(FaultPoint.RESUMED, flag("reopened"), after="behind", when=is_behind),
            Fault(
                FaultPoint.MESSAGE, wait("reopened", 5.0), after="behind",
                when=lambda moment: is_a(Promote)(moment) and is_behind(moment),
            ),
        ],
        servers=3,
        spec=DURABLE,
        killed=["ps-1"],
    ),
    # the coordinator has stood still: what it reads next was said before members noticed
    "who said something before it looked for another coordinator may come back": Scenario(
        [
            Fault("version", flag("stands still"), when=subject_is(20)),
            Fault(FaultPoint.TICK, disconnect("worker-1"), after="heard"),
            Fault(FaultPoint.TICK, [sleep(0.6), flag("lenient")], after="stands still"),
            Fault(
                FaultPoint.COORDINATOR_MESSAGE, flag("heard"), after="lenient",
                when=lambda moment: moment.subject == "worker-1",
            ),
        ],
        servers=1,
        how={**LASTING, "settings": replace(QUICK, lease=2.0, verdict=0.0)},
    ),
    "a barrier waits for who loses its connection for a moment": Scenario(
        [
            Fault("version", wait("lost", 10.0), task="worker-1", when=subject_is(20)),
            Fault(
                "version", lambda moment: moment.rehearsal.members[moment.task].barrier(), when=subject_is(20),
                always=True,
            ),
            Fault(
                FaultPoint.COORDINATOR_MESSAGE, flag("at the barrier"),
                when=lambda moment: isinstance(moment.about[1], AtBarrier),
            ),
            Fault(FaultPoint.TICK, flag("lost"), after="breaks"),
            Fault(FaultPoint.TICK, [disconnect("worker-1"), flag("breaks")], after="at the barrier"),
        ],
        servers=1,
        how=LASTING,
    ),
    # a connection to it is opened again just as it is known to be given up
    "nothing comes from a server that is given up and lives": Scenario(
        [
            Fault(
                FaultPoint.FRAME, [break_this_connection, flag("broken")], task="ps-1",
                when=lambda moment: moment.subject.task == "worker-1" and moment.header.version >= 20,
            ),
            Fault(
                FaultPoint.CONNECTED, [flag("held"), wait("followed")], task="worker-1", after="broken",
                when=lambda moment: moment.subject.task == "ps-1",
            ),
            Fault(FaultPoint.TICK, disconnect("ps-1"), after="held"),
            Fault(FaultPoint.READ_CONTROL, goes_when_the_job_is_over, task="ps-1", after="held", always=True),
            Fault(FaultPoint.OWNERS_CHANGED, flag("followed"), task="worker-1"),
        ],
        servers=3,
        spec=DURABLE,
        fails=["ps-1"],
    ),
    # it is to hear of the death, and says nothing more; meanwhile the plan that goes on without it is done
    "a dead worker's part is done whatever becomes of a server that leaves": Scenario(
        [
            Fault(FaultPoint.ENTER_PLAN, die, task="worker-2", when=plan_is(2)),
            Fault(FaultPoint.MESSAGE, die, task="ps-0", when=is_a(Exit)),
            Fault(FaultPoint.MESSAGE, drop, task="ps-0", when=is_a(Reassign), always=True),
        ],
        workers=3,
        events=[Event(10, servers=1, oldest=True)],
        killed=["ps-0", "worker-2"],
    ),
    # members hear at different times that a plan is done, and one is in the next already
    "connections for the next plan outlast the end of the one before": Scenario(
        [
            Fault(FaultPoint.PREPARED, sleep(0.15), when=lambda moment: "worker" in moment.task, always=True),
            Fault(
                FaultPoint.MESSAGE, sleep(0.05), always=True,
                when=lambda moment: is_a(PlanDone)(moment) and "worker" in moment.task,
            ),
            Fault(FaultPoint.READ_CONTROL, seldom(), task="ps-0", always=True),
        ],
        servers=1,
        events=[Event(0, workers=3, servers=2), Event(1, servers=3)],
        spec={"epochs": 30},
        how={"step_seconds": 0.01},
    ),
    # only the leaving server can report it: the completed plan lacks the new one, the next plan lacks the leaving one
    "a state is lost with the connection from a server that leaves to one that joins": Scenario(
        [
            # one plan has both changes
            Fault("version", flag("changes"), when=subject_is(9)),
            Fault(FaultPoint.CONSIDER_PLAN, drop, after="changes", until="joined", always=True),
            Fault(FaultPoint.TICK, flag("joined"), when=says("ps-2 on")),
            Fault(
                FaultPoint.FRAME, [break_this_connection, drop], task="ps-2",
                when=lambda moment: moment.header.kind == STATE and moment.subject.task == "ps-0",
            ),
        ],
        events=[Event(10, servers=3), Event(10, servers=2, oldest=True)],
        says=["ps-2 .*cannot reach ps-0 .*although both live"],
        fails=["ps-2"],
    ),
    # who comes in its place is sent the state later than it a sum
    "a backup that leaves need not acknowledge what the next one has": Scenario(
        [
            Fault(
                FaultPoint.FRAME, lambda moment: flag("gone")(moment) or True, always=True,
                when=lambda moment: moment.header.kind == REPLICATED and moment.subject.task == "ps-2"
                and moment.header.plan == 2,
            ),
            Fault(FaultPoint.REPLICA_DUE, drop, until="gone", always=True, when=subject_is(2)),
        ],
        servers=3,
        events=[Event(10, servers=2)],
        spec=DURABLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SCENARIOS)
def test_a_scenario(what, tmp_path, monkeypatch):
    monkeypatch.setattr("pslite.server.data_connections.BROKEN_SECONDS", 0.1)
    SCENARIOS[what].play(tmp_path)


def test_two_plans_that_are_made_ready_at_a_time_share_connections_and_the_first_is_passed_over(tmp_path):
    """A plan is given up while a server and a worker make it ready; the next one adds the same server."""
    late, staged = [], []
    faults = [
        # ps-0 and worker-0 are not ready when worker-1 will not take part
        Fault(
            FaultPoint.PREPARED, [lambda _: late.append(threading.current_thread()), flag("opened"), wait("committed")],
            task="ps-0", when=plan_is(2),
        ),
        Fault(FaultPoint.PREPARE, [wait("opened"), wait("given up")], task="worker-0", when=plan_is(2)),
        Fault(FaultPoint.PREPARE, [wait("opened"), fail(UsageError("not now"))], task="worker-1", when=plan_is(2)),
        Fault(FaultPoint.MESSAGE, flag("given up"), task="worker-0", when=is_a(Abort)),
        # what was late is there before anything moves
        Fault(FaultPoint.MESSAGE, [flag("committed"), lambda _: late[0].join()], task="ps-0", when=is_a(Commit)),
        Fault(FaultPoint.PLAN_KNOWN, lambda moment: staged.append((moment.task, moment.subject.number)), always=True),
        Fault("version", wait("committed"), when=subject_is(9), always=True),
    ]  # fmt: skip
    Scenario(faults, servers=1, events=[Event(5, servers=2)], says=["^plan 3 done"]).play(tmp_path)
    assert not {("ps-0", 2), ("worker-0", 2)} & set(staged)


STALLED = {
    "the coordinator's log": ("coordinator", FaultPoint.DISK, "log", 20),
    "the folder of checkpoints, for the coordinator": ("coordinator", FaultPoint.DISK, "checkpoint", 1),
    "the folder of checkpoints, for a server": ("ps-0", FaultPoint.DISK, "checkpoint", 1),
    "the digests of a large model": ("ps-1", FaultPoint.DIGEST, None, 1),
}


@pytest.mark.parametrize("what", STALLED)
def test_a_job_goes_on_while_something_takes_longer_than_the_lease(what, tmp_path):
    task, point, subject, nth = STALLED[what]
    about = (lambda moment: moment.subject == subject) if subject else (lambda _: True)
    spec = job(checkpoint=str(tmp_path), checkpoint_every=10)
    outcome = Rehearsal(
        spec, workers=2, servers=2, lasting=True, faults=[Fault(point, sleep(5.0), task=task, when=about, nth=nth)],
        settings=replace(QUICK, lease=2.0), step_seconds=0.02,
    ).run()  # fmt: skip
    assert not outcome.idle, outcome.story
    outcome.check(static_digest(structs.replace(spec, checkpoint="")))
    assert "died" not in outcome.story
    # the job has waited for what was being written
    written = [place.name for place in tmp_path.iterdir()]
    assert written
    assert all(map(str.isdecimal, written))


def test_a_worker_that_a_server_does_not_reach_any_more_is_found_and_given_up():
    """Nothing comes through between two members that live, although their connection stays open."""
    faults = [
        Fault("version", flag("apart"), task="worker-1", when=subject_is(20)),
        Fault(
            FaultPoint.FRAME, drop, task="ps-1", after="apart", always=True,
            when=lambda moment: moment.subject.task == "worker-1",
        ),
    ]  # fmt: skip
    settings = replace(QUICK, progress=ProgressRule(seconds=2.0, factor=5.0))
    Scenario(
        faults, workers=3, how={"settings": settings}, fails=["worker-1"],
        says=["worker-1 .* died or hangs: no progress .* it and ps-1 wait for each other"],
    ).play(Path())  # fmt: skip


def test_a_job_that_goes_back_again_and_again_fails(monkeypatch):
    monkeypatch.setattr("pslite.coordinator.checkpoints_and_rollback.MAX_ROLLBACKS", RateLimit(1, 60.0))
    outcome = Rehearsal(job(), workers=2, servers=2, events=[Event(9, kill="ps"), Event(20, kill="ps")]).run()
    assert outcome.status.state == "failed", outcome.story
    assert "gone back 1 times within 0.0166667 h without a newer checkpoint" in outcome.status.reason


def test_who_prefers_it_has_the_job_end_with_a_server():
    outcome = Rehearsal(job(on_loss="fail"), workers=2, servers=2, events=[Event(20, kill="ps", choice=1)]).run()
    assert outcome.status.state == "failed", outcome.story
    assert re.match(r"ps-\d on .* died.*on_loss is 'fail'", outcome.status.reason), outcome.story


def test_a_host_with_many_workers_dies_and_the_job_goes_on():
    """All at one time, at one version."""

    def host_dies(moment):
        for number in range(4):
            moment.rehearsal.kill(f"worker-{number}", replace=False)

    faults = [Fault("version", host_dies, when=subject_is(2))]
    outcome = Rehearsal(job(), workers=5, servers=1, faults=faults).run()
    outcome.check(static_digest(job()))
    assert len(outcome.killed) == 4
