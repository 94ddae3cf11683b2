"""Who is slow gets less: how work is divided, when a new division is worth a plan, and that no bit depends on it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearsal import QUICK, Event, Rehearsal, job, static_digest

from pslite.errors import UsageError
from pslite.job.job_spec import SGD, Part, Segment, block_bytes_for
from pslite.job.load_balancing import LoadBalancer, Rule, WorkDivision, loads, longest, shards_by_speed
from pslite.job.membership_plan import Member, make_plan, reduction
from pslite.job.reduction_tree import span
from pslite.job.shard_and_block_assignment import assign, consecutive_ranges
from pslite.job.step_time_and_usage_statistics import StepTimes, Throughput, ThroughputMeter
from pslite.job.weight_blocks import cut
from pslite.launch.environment_parsing import balance_of
from pslite.worker.training_session import Share

costs = st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=12)


# --- dividing shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "seconds", "counts"),
    [
        (16, [1.0], (16,)),
        (16, [1.0] * 4, (4, 4, 4, 4)),
        (16, [1.0, 1.0, 1.0, 2.0], (5, 5, 4, 2)),
        (7, [1.0, 1.0], (4, 3)),
        (4, [9.0, 1.0, 1.0, 1.0], (1, 1, 1, 1)),
        (10, [100.0, 1.0], (1, 9)),
    ],
)
def test_shards_by_hand(shards, seconds, counts):
    assert shards_by_speed(shards, seconds) == counts


@given(costs, st.integers(0, 60))
def test_every_shard_is_assigned_once_and_in_proportion_at_least(seconds, more):
    shards = len(seconds) + more
    counts = shards_by_speed(shards, seconds)
    assert sum(counts) == shards
    assert min(counts) >= 1
    assert counts == shards_by_speed(shards, seconds)
    speed = [1 / second for second in seconds]
    parts = [shards * own / sum(speed) for own in speed]
    if min(parts) >= 1:
        assert all(count > part * (1 - 1e-9) - 1 for count, part in zip(counts, parts, strict=True))
    # nobody would be done earlier by giving its last shard to another
    for giver, taker in itertools.permutations(range(len(seconds)), 2):
        if counts[giver] > 1:
            assert (counts[taker] + 1) * seconds[taker] >= counts[giver] * seconds[giver] * (1 - 1e-12)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(0, 6))
def test_no_division_is_done_earlier(seconds, more):
    shards = len(seconds) + more
    others = itertools.product(range(1, shards + 1), repeat=len(seconds))
    best = min(longest(counts, seconds) for counts in others if sum(counts) == shards)
    assert longest(shards_by_speed(shards, seconds), seconds) == pytest.approx(best)


def test_more_workers_than_shards():
    with pytest.raises(ValueError, match="3 workers cannot share 2 shards"):
        shards_by_speed(2, [1.0] * 3)
    with pytest.raises(ValueError, match="at least 1"):
        consecutive_ranges((3, 0))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.sampled_from(["exact", "fast"]))
def test_any_division_covers_every_shard_and_the_whole_tree(counts, mode):
    spec = job(samples=200, batch=100, shards=sum(counts), mode=mode)
    how = reduction(spec, len(counts), counts)
    assert [high - low for low, high in how.shards] == counts
    assert [shard for low, high in how.shards for shard in range(low, high)] == list(range(spec.shards))
    leaves = [leaf for nodes in how.nodes for node in nodes for leaf in range(*span(node, how.leaves))]
    assert leaves == list(range(how.leaves))
    shares = [Share(spec, len(counts), i, counts) for i in range(len(counts))]
    assert [share.amount(share.nodes) for share in shares] == counts


# --- dividing blocks ------------------------------------------------------------------------------------------------

sizes_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(sizes_lists, st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.data())
def test_blocks_are_level_to_a_block_whatever_the_speeds(sizes, speeds, data):
    names = [f"s{i}" for i in range(len(speeds))]
    before = {b: data.draw(st.sampled_from([*names, "gone"])) for b in range(len(sizes))}
    owners = assign(sizes, before, names, speeds)
    assert len(owners) == len(sizes)
    assert owners == assign(sizes, before, names, speeds)
    assert len(set(owners)) == min(len(names), len(sizes))  # nobody is without while another has two
    has = loads(sizes, owners, len(names))
    for giver, taker in itertools.permutations(range(len(names)), 2):
        if sum(owner == giver for owner in owners) > 1:
            assert has[giver] / speeds[giver] <= (has[taker] + max(sizes)) / speeds[taker] * (1 + 1e-12)


@given(sizes_lists, st.integers(1, 6), st.data())
def test_servers_that_are_alike_have_what_they_have_without_speeds(sizes, servers, data):
    names = [f"s{i}" for i in range(servers)]
    before = {b: data.draw(st.sampled_from([*names, "gone"])) for b in range(len(sizes))}
    assert assign(sizes, before, names, [1.0] * servers) == assign(sizes, before, names)


@given(sizes_lists, st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6))
def test_nothing_moves_where_all_is_level(sizes, speeds):
    names = [f"s{i}" for i in range(len(speeds))]
    owners = assign(sizes, {}, names, speeds)
    assert assign(sizes, {b: names[o] for b, o in enumerate(owners)}, names, speeds) == owners


def test_a_slow_server_gives_away_what_it_has_too_much_and_nothing_else_moves():
    before = {block: "ab"[block >= 6] for block in range(12)}
    owners = assign([10] * 12, before, ["a", "b"], [1.0, 2.0])
    assert [owners.count(0), owners.count(1)] == [4, 8]
    assert sum("ab"[owner] != before[block] for block, owner in enumerate(owners)) == 2


def resnet50() -> list[int]:
    """Sizes of its tensors: a stem, four stages of bottleneck blocks, and the classes."""
    sizes, before = [3 * 64 * 49, 64, 64], 64
    for width, number in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for inside in range(number):
            for inputs, outputs, kernel in ((before, width, 1), (width, width, 9), (width, 4 * width, 1)):
                sizes += [inputs * outputs * kernel, outputs, outputs]
            if inside == 0:
                sizes += [before * 4 * width, 4 * width, 4 * width]
            before = 4 * width
    return [*sizes, 2048 * 1000, 1000]


@pytest.mark.parametrize("servers", [1, 4, 10, 16, 32])
def test_a_real_model_is_level_to_a_block_in_bytes_and_in_requests(servers):
    """Optimus' example (section 5.3) has ten servers."""
    parts = tuple(Part(f"tensor {number}", (size,)) for number, size in enumerate(resnet50()))
    total = sum(4 * part.size for part in parts)
    assert total == 4 * 25_557_032
    spec = job(segments=(Segment("float32", SGD(lr=0.1), parts),), block_bytes=block_bytes_for(total))
    sizes = [block.nbytes for block in cut(spec)]
    assert max(sizes) == 1 << 20
    owners = assign(sizes, {}, [f"ps-{number}" for number in range(servers)])
    requests = [owners.count(number) for number in range(servers)]
    held = loads(sizes, owners, servers)
    assert sum(held) == total
    assert max(held) - min(held) <= max(sizes)
    assert max(requests) - min(requests) <= 1


# --- when ------------------------------------------------------------------------------------------------------------

RULE = Rule(measure=10.0, reports=3, gain=0.1, steady=2.0, worth=5.0, pause=20.0, most_pause=70.0, look=1.0, slow=1.3)
SIZES = [100] * 12


def member(task):
    return Member(task, "i", f"host-of-{task}", 1, address="h:1" if task.startswith("ps") else "")


def plan_of(workers=4, servers=2, division=None, previous=None):
    names = [f"worker-{i}" for i in range(workers)], [f"ps-{i}" for i in range(servers)]
    division = division or WorkDivision()
    blocks = [type("B", (), {"nbytes": size, "number": i})() for i, size in enumerate(SIZES)]
    return make_plan(
        1, blocks, [member(t) for t in names[0]], [member(t) for t in names[1]], previous,
        shares=division.shares(16, names[0]), speeds=division.speeds(names[1]),
    )  # fmt: skip


class Site:
    """A job whose members take given times, under a coordinator that follows every proposal."""

    def __init__(self, rule=RULE, by="speed", **plan):
        self.balance = LoadBalancer(rule, by)
        self.plan = plan_of(**plan)
        self.now = 0.0
        self.costs = dict.fromkeys([f"worker-{i}" for i in range(8)], 0.1) | {"ps-0": 1e-5, "ps-1": 1e-5}
        self.honest = True
        self.left = 10_000
        self.proposals = []
        self.balance.begin(0.0, self.plan)

    def step_seconds(self):
        how = reduction(job(samples=200, batch=100, shards=16), len(self.plan.workers), self.plan.shares)
        computing = max(
            (high - low) * self.costs[m.task] for m, (low, high) in zip(self.plan.workers, how.shards, strict=True)
        )
        owned = loads(SIZES, self.plan.owners, len(self.plan.servers))
        return computing + max(own * self.costs[m.task] for m, own in zip(self.plan.servers, owned, strict=True))

    def run(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            step = self.step_seconds() if self.honest else 0.5
            for m in (*self.plan.workers, *self.plan.servers):
                steps = StepTimes(steps=5, mean_ms=1e3 * step, p95_ms=1e3 * step) if m in self.plan.workers else None
                self.balance.note(m.task, Throughput(seconds=10 * self.costs[m.task], amount=10), steps)
            proposal = self.balance.consider(self.now, self.plan, 16, SIZES, self.left)
            if proposal is not None:
                self.proposals.append((self.now, proposal))
                self.plan = plan_of(len(self.plan.workers), len(self.plan.servers), self.balance.division, self.plan)
                self.balance.begin(self.now, self.plan)
        return self


def test_all_alike_stays_as_it_is():
    assert Site().run(300).proposals == []
    assert Site().run(300).balance.stragglers == ()


def test_a_slow_worker_gets_less_once_and_more_when_it_is_well_again():
    site = Site()
    site.costs["worker-3"] = 0.2
    site.run(300)
    ((at, proposal),) = site.proposals
    assert at == 12.0  # measured for 10 s, steady for 2
    assert site.plan.shares == (5, 5, 4, 2)
    assert proposal.reason == "shards 4/4/4/4 become 5/5/4/2"
    # 4 shards of 0.2 s became 5 of 0.1, of a step of 0.806 s
    assert proposal.gain == pytest.approx(0.3 / 0.806, abs=1e-3)
    (slow,) = site.balance.stragglers
    assert (slow.task, slow.host, slow.factor) == ("worker-3", "host-of-worker-3", 2.0)
    assert slow.reason == "computes a shard in 200 ms, the others in 100 ms"
    site.costs["worker-3"] = 0.1
    site.run(300)
    assert len(site.proposals) == 2
    assert site.plan.shares == ()
    assert site.balance.division == WorkDivision()


def test_a_slow_server_gets_less_where_it_is_servers_that_steps_wait_for():
    site = Site()
    site.costs["ps-1"] = 1e-4  # 600 bytes take 60 ms of 460
    site.run(300)
    ((_, proposal),) = site.proposals
    assert loads(SIZES, site.plan.owners, 2)[1] < 600
    assert "move between servers" in proposal.reason
    assert site.plan.shares == ()
    (slow,) = site.balance.stragglers
    assert slow.task == "ps-1"
    idle = Site()
    idle.costs["ps-1"] = 1e-4
    idle.costs.update(dict.fromkeys([f"worker-{i}" for i in range(8)], 10.0))
    assert idle.run(300).proposals == []  # 60 ms of 40 s
    assert [straggler.task for straggler in idle.balance.stragglers] == ["ps-1"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cost": 0.11}, "a tenth slower is no gain"),
        ({"left": 5}, "the job is almost done"),
        ({"by": "even"}, "it is not wanted"),
        ({"seconds": 11}, "not measured for long enough"),
    ],
)
def test_what_is_not_worth_a_plan(change, why):
    site = Site(by=change.get("by", "speed"))
    site.costs["worker-3"] = change.get("cost", 0.2)
    site.left = change.get("left", 10_000)
    assert site.run(change.get("seconds", 300)).proposals == [], why


def test_noise_makes_no_plan():
    site = Site()
    for second in range(600):
        # each is slow for three seconds at a time, by turns
        for i in range(4):
            site.costs[f"worker-{i}"] = 0.3 if second // 3 % 4 == i else 0.1
        site.run(1)
    assert site.proposals == []


def test_a_member_that_changes_again_and_again_gets_few_plans():
    site = Site()
    for second in range(2000):
        site.costs["worker-3"] = 0.2 if second // 40 % 2 else 0.1
        site.run(1)
    times = [at for at, _ in site.proposals]
    assert all(later - earlier >= RULE.pause for earlier, later in itertools.pairwise(times))
    site = Site()
    site.honest = False  # steps take as long as before, however it is divided
    for second in range(2000):
        site.costs["worker-3"] = 0.2 if second // 40 % 2 else 0.1
        site.run(1)
    later = [at for at, _ in site.proposals]
    assert 1 < len(later) < len(times)
    assert max(b - a for a, b in itertools.pairwise(later)) >= RULE.most_pause


def test_plans_of_other_sizes_keep_to_what_was_measured():
    division = WorkDivision(workers={"worker-0": 0.2, "worker-1": 0.1, "worker-2": 0.1})
    assert division.shares(16, ["worker-0", "worker-1"]) == (5, 11)
    # a new one counts as the median
    assert division.shares(16, ["worker-0", "worker-1", "worker-9"]) == shards_by_speed(16, [0.2, 0.1, 0.15])
    assert division.shares(16, ["worker-7", "worker-8"]) == ()
    assert division.speeds(["ps-0"]) == ()
    assert WorkDivision(servers={"ps-0": 0.5, "ps-1": 0.25}).speeds(["ps-1", "ps-0"]) == (4.0, 2.0)


# --- measuring ------------------------------------------------------------------------------------------------------


def test_work_is_told_once():
    now = [0.0]
    meter = ThroughputMeter(lambda: now[0])
    assert meter.take() is None
    for until, amount in ((2.0, 3), (5.0, 1)):
        now[0] += 1.0
        meter.begin()
        now[0] = until
        meter.end()
        meter.add(amount)
    assert meter.take() == Throughput(seconds=3.0, amount=4)
    assert meter.take() is None
    meter.begin()
    now[0] = 8.0
    meter.end()
    assert meter.take() is None  # busy, but nothing is done yet
    meter.add(1)
    assert meter.take() == Throughput(seconds=3.0, amount=1)


def test_the_users_word():
    assert balance_of({}) == "speed"
    assert balance_of({"DL2_BALANCE": "even"}) == "even"
    with pytest.raises(UsageError, match="DL2_BALANCE is 'fast'"):
        balance_of({"DL2_BALANCE": "fast"})


# --- whole jobs -----------------------------------------------------------------------------------------------------

#: as the default, thirty times as fast
HASTY = replace(
    QUICK, rule=Rule(measure=0.5, reports=3, gain=0.15, steady=0.1, worth=0.0, pause=1.0, look=0.02, slow=1.5)
)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_slow_worker_gets_fewer_shards_and_the_weights_are_the_same(mode):
    spec = job(epochs=40, mode=mode)
    slow = {"worker-0": 0.002, "worker-1": 0.002, "worker-2": 0.008}
    outcome = Rehearsal(spec, workers=3, servers=2, slow=slow, settings=HASTY).run()
    log = "\n".join(outcome.log)
    assert outcome.status.state == "finished", log
    assert not outcome.surprises, log
    if mode == "exact":
        assert outcome.status.result.digest == static_digest(spec), log
        assert "shards 2/3/3 become " in log
        assert any("worker-2 on " in line and " is slow: it computes a shard in " in line for line in outcome.log), log
    # a plan like any other, of the same size
    assert [(p.workers, p.servers, p.added, p.removed) for p in outcome.status.plans[1:2]] in ([], [(3, 2, [], [])]), (
        log
    )


def test_a_slow_server_gets_fewer_blocks_and_the_weights_are_the_same():
    spec = job(epochs=40)
    slow = {"ps-0": 0.0002, "ps-1": 0.004}
    outcome = Rehearsal(spec, workers=2, servers=2, slow=slow, settings=HASTY).run()
    log = "\n".join(outcome.log)
    assert outcome.status.state == "finished", log
    assert outcome.status.result.digest == static_digest(spec), log
    assert not outcome.surprises, log
    assert "move between servers" in log
    assert any("ps-1 on " in line and " is slow: it updates 1 MB in " in line for line in outcome.log), log
    assert [p.moved_bytes > 0 for p in outcome.status.plans[1:2]] == [True], log


def test_resizes_and_a_death_among_plans_of_the_balance():
    spec = job(epochs=40)
    events = [Event(60, workers=4), Event(110, kill="worker", choice=1), Event(150, workers=2, servers=3)]
    slow = {f"worker-{i}": 0.006 if i % 2 else 0.001 for i in range(12)}
    outcome = Rehearsal(spec, workers=3, servers=2, slow=slow, events=events, settings=HASTY).run()
    log = "\n".join(outcome.log)
    assert outcome.status.state == "finished", log
    assert outcome.status.result.digest == static_digest(spec), log
    assert not outcome.surprises, log


def test_even_is_even():
    spec = job(epochs=10)
    slow = {"worker-0": 0.001, "worker-1": 0.006}
    outcome = Rehearsal(spec, workers=2, servers=1, slow=slow, settings=replace(HASTY, balance="even")).run()
    assert outcome.status.state == "finished", outcome.log
    assert len(outcome.status.plans) == 1
