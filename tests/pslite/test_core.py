"""The pure parts: reduction tree, shards, order of samples, assignment, optimizers, descriptions, membership."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pslite.errors import SpecError
from pslite.job.job_spec import SGD, Adam, JobSpec, Mean, Part, Segment, block_bytes_for, differences
from pslite.job.learning_rates import Constant, Cosine, Milestones, Polynomial, StepDecay
from pslite.job.membership_plan import next_members, reduction
from pslite.job.reduction_tree import ROOT, TreeSum, cover, held, span, width
from pslite.job.sample_order import permutation, stream
from pslite.job.shard_and_block_assignment import assign, ranges, sample_slice
from pslite.job.weight_blocks import cut
from pslite.numeric.gradient_sums import GradientSums, Supply
from pslite.numeric.optimizers import Updater, slots

# --- tree -----------------------------------------------------------------------------------------------------------


def add(left, right):
    return left + right


def tree_value(leaves, values, cuts, order_seed):
    """Sum as a job does: every worker up to its cover, the server the rest, in some order of arrival."""
    edges = [0, *sorted(cuts), leaves]
    arrivals = []
    for low, high in pairwise(edges):
        tops = cover(low, high, leaves)
        own = TreeSum(leaves, frozenset(tops))
        done = [own.add(width(leaves) + i, values[i], add) for i in range(low, high)]
        done = [entry for entry in done if entry]
        assert sorted(node for node, _ in done) == sorted(tops)
        arrivals += done
    np.random.Generator(np.random.PCG64(order_seed)).shuffle(arrivals)
    server = TreeSum(leaves, frozenset((ROOT,)))
    results = [server.add(node, value, add) for node, value in arrivals]
    assert [r is not None for r in results] == [False] * (len(results) - 1) + [True]
    return results[-1][1]


@given(data=st.data())
def test_any_partition_of_the_shards_gives_the_same_bits(data):
    leaves = data.draw(st.integers(1, 40))
    values = np.array(
        data.draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=leaves, max_size=leaves)), dtype=np.float32
    )
    cuts = data.draw(st.sets(st.integers(1, max(1, leaves - 1)), max_size=leaves)) if leaves > 1 else set()
    whole = tree_value(leaves, values, set(), 0)
    parts = tree_value(leaves, values, cuts, data.draw(st.integers(0, 99)))
    assert np.float32(whole).tobytes() == np.float32(parts).tobytes()


def test_the_tree_is_not_the_left_to_right_sum():
    # otherwise the test above could pass with any order of summation
    values = np.array([1e8, 1.0, -1e8, 1.0], dtype=np.float32)
    assert tree_value(4, values, {1, 2, 3}, 1) == (values[0] + values[1]) + (values[2] + values[3])
    assert tree_value(4, values, set(), 0) != ((values[0] + values[1]) + values[2]) + values[3]


@given(leaves=st.integers(1, 64), data=st.data())
def test_a_cover_is_disjoint_complete_and_maximal(leaves, data):
    low = data.draw(st.integers(0, leaves - 1))
    high = data.draw(st.integers(low + 1, leaves))
    nodes = cover(low, high, leaves)
    covered = [leaf for node in nodes for leaf in range(*span(node, leaves))]
    assert covered == list(range(low, high))
    for node in nodes:
        first, last = span(node >> 1, leaves) if node > ROOT else (0, 0)
        assert node == ROOT or first < low or last > high


def test_numbers_of_pushes_for_sixteen_shards():
    assert {w: sum(len(cover(*r, 16)) for r in ranges(16, w)) for w in (1, 2, 4, 8, 16)} == {
        1: 1,
        2: 2,
        4: 4,
        8: 8,
        16: 16,
    }


@pytest.mark.parametrize(
    ("low", "high", "shards", "most"),
    [(0, 1, 16, 1), (0, 2, 4, 1), (2, 4, 4, 1), (0, 4, 4, 2), (1, 4, 4, 2), (0, 3, 3, 2), (0, 16, 16, 4)],
)
def test_values_held_while_a_sum_is_made(low, high, shards, most):
    assert held(cover(low, high, shards), shards) == most


class Counting(Supply):
    def __init__(self, spec, blocks):
        super().__init__(spec, blocks)
        self.given = []

    def take(self):
        self.given.append(super().take())
        return self.given[-1]


@given(st.integers(1, 16), st.data())
def test_a_step_needs_as_much_memory_as_is_said_before_it(shards, data):
    workers = data.draw(st.integers(1, shards))
    spec = make_spec(shards=shards, batch=16, samples=16)
    nodes = reduction(spec, workers).nodes[data.draw(st.integers(0, workers - 1))]
    supply = Counting(spec, cut(spec))
    supply.reserve(held(nodes, shards))
    sums = GradientSums(spec, supply)
    for _ in range(2):
        sums.begin(shards, nodes)
        for node in nodes:
            for leaf in range(*span(node, shards)):
                sums.add(leaf, sums.take_for(leaf)[0])
    assert len(supply.given) == held(nodes, shards)


def test_memory_that_is_there_before_is_what_is_given():
    spec = make_spec()
    supply = Supply(spec, cut(spec))
    first = supply.take()
    supply.reserve(3)
    supply.reserve(3)
    taken = [first, *(supply.take() for _ in range(3))]
    assert len({bundle.memory.ctypes.data for bundle in taken}) == 4
    assert not any(bundle.memory.any() for bundle in taken)


def test_a_value_above_every_top_is_refused():
    with pytest.raises(ValueError, match="is not below a top node"):
        TreeSum(1, frozenset()).add(ROOT, 1.0, add)


# --- shards and samples ---------------------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 64),
    shards=st.integers(1, 20),
    epochs=st.integers(1, 3),
    seed=st.integers(-(2**63), 2**63 - 1),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_every_sample_of_an_epoch_is_used_exactly_once_whatever_the_sizes(samples, batch, shards, epochs, seed, sizes):
    batch = min(batch, samples)
    shards = min(shards, batch)
    spec = make_spec(samples=samples, batch=batch, shards=shards, epochs=epochs, seed=seed)
    used = [Counter() for _ in range(epochs)]
    for version in range(spec.total_versions):
        workers = min(sizes[version % len(sizes)], shards)
        epoch, first, count = spec.position(version)
        order = permutation(seed, epoch, samples)[first : first + count]
        assert order.size == count
        for low, high in ranges(shards, workers):
            start, stop = sample_slice(low, high, shards, count)
            used[epoch].update(order[start:stop].tolist())
    for counts in used:
        assert counts == Counter(range(samples))


@given(seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 10**6), samples=st.integers(1, 500))
def test_the_order_is_a_permutation(seed, epoch, samples):
    assert sorted(permutation(seed, epoch, samples).tolist()) == list(range(samples))


def test_the_order_never_changes():
    # fixed for good: another order would break the equality of runs made with different versions of pslite
    assert permutation(1, 0, 12).tolist() == [4, 8, 7, 0, 10, 3, 9, 6, 1, 11, 2, 5]
    assert permutation(1, 1, 12).tolist() != permutation(1, 0, 12).tolist()
    assert permutation(2, 0, 12).tolist() != permutation(1, 0, 12).tolist()
    assert len({stream(1, 2), stream(2, 1), stream(1, 2, 0), stream(-1, 2)}) == 4


@pytest.mark.parametrize(("shards", "workers"), [(16, 0), (4, 5)])
def test_too_many_or_no_workers_for_the_shards(shards, workers):
    with pytest.raises(ValueError, match="cannot share"):
        ranges(shards, workers)


# --- assignment -----------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_assignment_is_balanced_and_moves_little(data):
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=60))
    names = [f"ps-{i}" for i in range(8)]
    old = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    new = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    first = assign(sizes, {}, old)
    before = {block: old[owner] for block, owner in enumerate(first)}
    owners = assign(sizes, before, new)
    assert all(0 <= owner < len(new) for owner in owners)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == i) for i in range(len(new))]
    assert max(loads) - min(loads) <= max(sizes)
    assert len(set(owners)) == min(len(new), len(sizes))
    moved = sum(size for block, size in enumerate(sizes) if before[block] != new[owners[block]])
    # what has to move: everything of servers that leave, and what stayers hold above the average
    average = sum(sizes) / len(new)
    load_before = {name: sum(sizes[b] for b, owner in before.items() if owner == name) for name in old}
    forced = sum(load for name, load in load_before.items() if name not in new)
    excess = sum(max(0.0, load - average) for name, load in load_before.items() if name in new)
    assert moved <= forced + excess + max(sizes) * len(new)


@given(blocks=st.integers(1, 100), servers=st.integers(1, 8), more=st.integers(0, 4))
def test_equal_blocks_differ_by_at_most_one_and_only_the_necessary_moves(blocks, servers, more):
    names = [f"ps-{i}" for i in range(servers + more)]
    before = dict(enumerate(assign([7] * blocks, {}, names[:servers])))
    owners = assign([7] * blocks, {b: names[o] for b, o in before.items()}, names)
    counts = [owners.count(i) for i in range(len(names))]
    assert max(counts) - min(counts) <= 1
    assert sum(before[b] != owner for b, owner in enumerate(owners)) == sum(counts[servers:])


def test_nothing_moves_when_nothing_changes():
    sizes = [5, 9, 1, 7, 7, 2]
    owners = assign(sizes, {}, ["a", "b"])
    assert assign(sizes, {b: "ab"[o] for b, o in enumerate(owners)}, ["a", "b"]) == owners
    with pytest.raises(ValueError, match="at least one server"):
        assign(sizes, {}, [])


# --- optimizers -----------------------------------------------------------------------------------------------------

RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adam(lr=0.01),
    Adam(lr=0.01, weight_decay=0.1),
    Adam(lr=0.01, weight_decay=0.1, decoupled=True),
    Mean(),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 300), data=st.data())
@settings(max_examples=15)
def test_a_block_cut_in_two_has_the_same_bits(rule, seed, size, data):
    rng = np.random.Generator(np.random.PCG64(seed))
    at = data.draw(st.integers(0, size))
    state = np.zeros((1 + slots(rule), size), dtype=np.float32)
    state[0] = rng.standard_normal(size)
    left, right = state[:, :at].copy(), state[:, at:].copy()
    updater = Updater()
    for version in range(3):
        gradient = rng.standard_normal(size).astype(np.float32)
        updater.apply(rule, left, gradient[:at].copy(), 7, version)
        updater.apply(rule, right, gradient[at:].copy(), 7, version)
        updater.apply(rule, state, gradient.copy(), 7, version)
    assert state.tobytes() == np.concatenate([left, right], axis=1).tobytes()


def test_a_block_larger_than_the_cache_piece():
    state = np.ones((1, 100_001), dtype=np.float64)
    Updater().apply(SGD(lr=1.0), state, np.arange(100_001, dtype=np.float64), 4, 0)
    assert np.array_equal(state[0], 1 - np.arange(100_001) / 4)


# --- descriptions ---------------------------------------------------------------------------------------------------


def make_spec(**changes):
    values = {
        "segments": (Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("w", (10, 3)), Part("b", (3,)))),),
        "samples": 100,
        "batch": 10,
        "epochs": 2,
        "seed": 1,
        "mode": "exact",
        "shards": 4,
        "block_bytes": 64,
    }
    return JobSpec(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 10**7}, "epochs is 10000000"),
        ({"batch": 101}, "batch_size is 101, more than the 100 samples"),
        ({"batch": 0}, "batch_size is 0"),
        ({"samples": 0}, "number of samples in the data set is 0"),
        ({"shards": 11}, "shards is 11"),
        ({"segments": ()}, "no trainable parameters"),
        (
            {"segments": (Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("e", (0,)),)),)},
            "e has shape",
        ),
    ],
)
def test_an_unusable_job_is_refused_with_the_name_of_the_value(changes, message):
    with pytest.raises(SpecError, match=message):
        make_spec(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-1.0), "SGD lr is -1.0"),
        (lambda: StepDecay(every=0), "StepDecay every is 0"),
        (lambda: Milestones(at=(3, -1)), "Milestones at is -1"),
        (lambda: Cosine(over=5, floor=2.0), "Cosine floor is 2.0"),
        (lambda: Polynomial(over=5, power=-1.0), "Polynomial power is -1.0"),
        (lambda: Constant(warmup=-3), "Constant warmup is -3"),
        (lambda: SGD(lr=math.nan), "SGD lr is nan"),
        (lambda: SGD(lr=0.1, momentum=1.0), "SGD momentum is 1.0"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda: Adam(eps=-1e-8), "eps"),
    ],
)
def test_an_unusable_optimizer_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_what_comes_over_the_wire_is_checked_like_what_is_written():
    spec = make_spec()
    data = msgspec.to_builtins(spec)
    assert msgspec.convert(data, JobSpec) == spec
    data["epochs"] = -1
    with pytest.raises(msgspec.ValidationError, match="epochs is -1"):
        msgspec.convert(data, JobSpec)


def test_differences_are_named():
    other = make_spec(
        batch=20,
        segments=(Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("w", (10, 4)), Part("c", (3,)))),),
    )
    text = "\n".join(differences(make_spec(), other))
    assert "batch: 10 here, 20 there" in text
    assert "tensor w: [10, 3]" in text
    assert "tensor b:" in text
    assert "absent there" in text
    assert differences(make_spec(), make_spec()) == []


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=6), limit=st.integers(64, 4096))
def test_blocks_cover_the_model_without_gaps(sizes, limit):
    parts = tuple(Part(f"p{i}", (n,)) for i, n in enumerate(sizes))
    segments = (
        Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=parts),
        Segment(dtype="float64", optimizer=Mean(), parts=(Part("m", (5,)),)),
    )
    blocks = cut(make_spec(segments=segments, block_bytes=limit))
    for index, segment in enumerate(segments):
        mine = [b for b in blocks if b.segment == index]
        assert [b.offset for b in mine] == [sum(x.size for x in mine[:i]) for i in range(len(mine))]
        assert sum(b.size for b in mine) == segment.size
        assert all(b.nbytes <= limit for b in mine)
    assert [b.number for b in blocks] == list(range(len(blocks)))


def test_block_sizes():
    assert block_bytes_for(100) == 1024
    assert block_bytes_for(102_228_128) == 1 << 20
    assert block_bytes_for(1 << 20) == 1 << 15


# --- membership -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "joined", "target", "limit", "expected"),
    [
        ([], ["a", "b"], None, 9, ("a", "b")),
        (["a", "b"], ["c"], {"a", "c"}, 9, ("a", "c")),
        (["a"], [], {"b"}, 9, ("a",)),  # never empty: the replacement has not come yet
        (["a"], ["b"], {"b"}, 9, ("b",)),
        (["a"], ["b"], {"a"}, 9, ("a",)),  # joined, but nobody wants it
        (["a"], ["b", "c"], None, 2, ("a", "b")),
        ([], [], None, 9, ()),
    ],
)
def test_next_members(present, joined, target, limit, expected):
    assert next_members(present, joined, None if target is None else frozenset(target), limit) == expected


def test_reductions():
    exact = reduction(make_spec(), 3)
    assert exact.leaves == 4
    assert exact.shards == ((0, 1), (1, 2), (2, 4))
    fast = reduction(make_spec(mode="fast"), 3)
    assert fast.leaves == 3
    assert [len(nodes) for nodes in fast.nodes] == [1, 1, 1]
