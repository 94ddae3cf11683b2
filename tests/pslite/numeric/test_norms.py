"""LAMB: what the paper says, and the same bits however its tensors are cut and wherever their pieces lie."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsal import KINDS, Event, Fault, Rehearsal, job, static_digest

from pslite.fault_points import FaultPoint
from pslite.job.job_spec import LAMB, JobSpec, Mean, Part, Segment
from pslite.job.weight_blocks import cut
from pslite.net.messages import Factors
from pslite.numeric.gradient_sums import Bundle, Contribution
from pslite.numeric.norms import Tensors
from pslite.numeric.optimizers import Updater
from pslite.worker.single_process_session import SingleSession


def spec_of(sizes, rule, *, block_bytes=64, dtype="float32", **changes):
    parts = tuple(Part(f"t{i}", (size,)) for i, size in enumerate(sizes))
    values = {
        "segments": (Segment(dtype=dtype, optimizer=rule, parts=parts),), "samples": 8, "batch": 4, "epochs": 3,
        "seed": 1, "mode": "exact", "shards": 2, "block_bytes": block_bytes,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


def follow(spec, gradients, start, skipped=0):
    """Train one process on given mean gradients, after a number of steps without any; return the weights."""
    session = SingleSession(spec)
    session.weights.arrays[0][:] = start
    session.start()
    bundle = Bundle(spec, session.blocks)
    for _ in range(skipped):
        bundle.idle = frozenset((0,))
        session.exchange([Contribution(1, bundle)], 0.0, 4)
    bundle.idle = frozenset()
    for gradient in gradients:
        bundle.arrays[0][:] = np.asarray(gradient) * 4
        session.exchange([Contribution(1, bundle)], 0.0, 4)
    return session.weights.arrays[0].copy()


def algorithm_2(rule, sizes, gradients, start):
    """You et al. 2020, algorithm 2, written from the paper; phi(z) = z."""
    layers = np.split(np.asarray(start, dtype=np.float64), np.cumsum(sizes)[:-1])
    found = []
    for index, x in enumerate(layers):
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, gradient in enumerate(gradients, 1):
            g = np.split(np.asarray(gradient, dtype=np.float64), np.cumsum(sizes)[:-1])[index]
            m = rule.betas[0] * m + (1 - rule.betas[0]) * g
            v = rule.betas[1] * v + (1 - rule.betas[1]) * g**2
            r = (m / (1 - rule.betas[0] ** t)) / (np.sqrt(v / (1 - rule.betas[1] ** t)) + rule.eps)
            u = r + rule.weight_decay * x
            length = np.linalg.norm(x)
            ratio = length / np.linalg.norm(u) if length and np.linalg.norm(u) else 1.0
            x = x - rule.lr * ratio * u  # noqa: PLW2901
        found.append(x)
    return np.concatenate(found)


@pytest.mark.parametrize("rule", [LAMB(lr=0.01), LAMB(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)], ids=str)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    block=st.sampled_from([16, 64, 1024]),
    zero=st.booleans(),
)
@settings(max_examples=25)
def test_it_computes_what_the_paper_says(rule, sizes, seed, block, zero):
    rng = np.random.Generator(np.random.PCG64(seed))
    start = rng.standard_normal(sum(sizes))
    if zero:
        start[: sizes[0]] = 0.0  # a tensor without length
    gradients = [rng.standard_normal(sum(sizes)) for _ in range(5)]
    mine = follow(spec_of(sizes, rule, block_bytes=block, dtype="float64"), gradients, start)
    np.testing.assert_allclose(mine, algorithm_2(rule, sizes, gradients, start), rtol=1e-9, atol=1e-12)
    single = follow(spec_of(sizes, rule, block_bytes=block), gradients, start)
    np.testing.assert_allclose(single, algorithm_2(rule, sizes, gradients, start), rtol=2e-3, atol=2e-4)


def test_a_hand_worked_step():
    # m^ = g, v^ = g^2, so the update of each element is the sign of its gradient: length 2; that of the weights is 4
    mine = follow(spec_of([4], LAMB(lr=0.5, eps=0.0), dtype="float64"), [[1.0, -5.0, 0.5, 3.0]], 2.0)
    np.testing.assert_allclose(mine, [1.0, 3.0, 1.0, 1.0])


def test_steps_without_a_gradient_do_not_count():
    spec, gradients = spec_of([3, 20], LAMB(lr=0.1)), [np.linspace(-1, 1, 23)] * 2
    np.testing.assert_array_equal(follow(spec, gradients, 2.0, skipped=3), follow(spec, gradients, 2.0))


def test_which_blocks_ask_others():
    spec = spec_of([3, 20, 2, 4], LAMB())  # blocks of 16 elements: 3 + 13 | 7 + 2 + 4
    tensors = Tensors(spec, cut(spec))
    assert [tuple(pieces) for pieces in tensors.pieces] == [((0, 3), (1, 13)), ((1, 7), (2, 2), (3, 4))]
    assert tensors.blocks_sharing_tensors == {0, 1}
    spec = spec_of([16, 16, 5], LAMB())
    assert not Tensors(spec, cut(spec)).blocks_sharing_tensors
    spec = spec_of([40], Mean(), dtype="float64")
    assert not Tensors(spec, cut(spec)).blocks_sharing_tensors


def test_without_its_factors_nothing_is_applied():
    with pytest.raises(ValueError, match="a factor for each tensor"):
        Updater().apply(LAMB(), np.zeros((3, 4)), np.ones(4), 1, 0)


@pytest.mark.parametrize("kind", ["adam, clipped by norm", "lamb"])
def test_servers_die_when_only_some_have_heard_of_a_factor(kind):
    """What has come in their place has some blocks before the step, and the others after it."""

    def both_die(moment):
        def kill():
            for choice in (1, 0):  # one after the other, so that each choice means the same server every time
                moment.rehearsal.happen(Event(0, kill="ps", choice=choice))

        threading.Timer(0.02, kill).start()
        return True

    fault = Fault(
        FaultPoint.MESSAGE, both_die, task="ps-1",
        when=lambda moment: isinstance(moment.subject, Factors) and moment.subject.version == 20,
    )  # fmt: skip
    spec = job(**KINDS[kind])
    outcome = Rehearsal(spec, workers=2, servers=2, faults=[fault]).run()
    assert sorted(outcome.killed) == ["ps-0", "ps-1"], outcome.story
    outcome.check(static_digest(spec))
