"""Tables of which a step touches a few rows: only those travel, only those change, and exact mode stays exact."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from regression import Lookup, table_segments
from rehearsal import Rehearsal, job
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pslite.errors import ProtocolError, SpecError
from pslite.job.job_spec import LAMB, SGD, Adam, Part, Segment
from pslite.job.weight_blocks import Block, cut
from pslite.net.tensor_frames import PARAM, PARAM_ROWS, PUSH, Link
from pslite.numeric.gradient_sums import GradientSums
from pslite.numeric.sparse_rows import Rows, checked_length, parse
from pslite.torch import ElasticJob, Group
from pslite.worker.single_process_session import SingleSession

BLOCK = Block(0, 0, 20, 40, "float32", SGD(lr=0.1), row=4)  # rows 5 to 14 of a table of width 4

tables = st.dictionaries(st.integers(0, 30), st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2))


def rows_of(table):
    numbers = np.array(sorted(table), dtype=np.uint32)
    return Rows(numbers, np.array([table[n] for n in sorted(table)], dtype=np.float32).reshape(-1, 2))


@given(left=tables, right=tables)
def test_a_sum_has_the_rows_of_both(left, right):
    total = rows_of(left).plus(rows_of(right))
    assert total.numbers.tolist() == sorted({*left, *right})
    for number, values in zip(total.numbers, total.values, strict=True):
        terms = [np.array(side[number], dtype=np.float32) for side in (left, right) if number in side]
        assert values.tobytes() == sum(terms[1:], terms[0]).tobytes()


@given(st.lists(st.integers(0, 9), max_size=30))
def test_rows_given_several_times_are_added(numbers):
    rows = Rows.of(np.array(numbers, dtype=np.int64), np.ones((len(numbers), 3), dtype=np.float32))
    assert dict(zip(rows.numbers.tolist(), rows.values[:, 0].tolist(), strict=True)) == Counter(numbers)


@given(st.sets(st.integers(0, 20)))
def test_what_travels_is_what_comes(numbers):
    rows = Rows.of(np.array(sorted(numbers), dtype=np.int64), np.ones((len(numbers), 4), dtype=np.float32))
    inside = rows.within(BLOCK)
    assert inside.numbers.tolist() == [n - 5 for n in sorted(numbers) if 5 <= n < 15]
    data = b"".join(inside.views())
    assert checked_length(BLOCK, len(data)) == inside.nbytes == len(data)
    back = parse(BLOCK, memoryview(data))
    assert back.numbers.tolist() == inside.numbers.tolist()
    assert back.values.tolist() == inside.values.tolist()


@pytest.mark.parametrize("length", [1, 19, 21, 220, 2**32 - 20])
def test_lengths_that_are_no_rows_are_refused_before_anything_is_allocated(length):
    with pytest.raises(ProtocolError, match=f"{length} bytes cannot be rows of block 0"):
        checked_length(BLOCK, length)


@pytest.mark.parametrize("numbers", [[10], [3, 3], [3, 2], [2**32 - 1], [0, 2**31]])
def test_rows_that_a_block_does_not_have_are_refused(numbers):
    data = np.array(numbers, dtype=np.uint32).tobytes() + bytes(16 * len(numbers))
    with pytest.raises(ProtocolError, match="row numbers of block 0 must be ascending and below"):
        parse(BLOCK, memoryview(data))


def test_blocks_hold_whole_rows():
    spec = job(segments=table_segments(30, 5, SGD(lr=0.1)), block_bytes=64)
    table = [block for block in cut(spec) if block.row]
    assert [block.size for block in table] == [15] * 10
    spec = job(segments=table_segments(3, 100, SGD(lr=0.1)), block_bytes=64)
    assert [block.size for block in cut(spec) if block.row] == [100] * 3


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        (SGD(lr=0.1, momentum=0.9), (5, 2), "t is sparse: its optimizer must be SGD without momentum"),
        (SGD(lr=0.1, weight_decay=0.1), (5, 2), "its optimizer must be"),
        (Adam(weight_decay=0.1), (5, 2), "its optimizer must be"),
        (LAMB(), (5, 2), "its optimizer must be"),
        (Adam(), (5,), "t is sparse: it must be one table"),
        (Adam(), (5, 1 << 19), "rows of more than 1 MiB"),
    ],
)
def test_what_cannot_be_sparse(rule, shape, message):
    with pytest.raises(SpecError, match=message):
        Segment(dtype="float32", optimizer=rule, parts=(Part("t", shape),), sparse=True)


def test_only_rows_travel(monkeypatch):
    monkeypatch.setenv("DL2_TRANSPORT", "tcp")
    sent, lock, send = Counter(), threading.Lock(), Link.send

    def note(link, header, *payload):
        with lock:
            sent[header.kind] += sum(piece.nbytes for piece in payload)
        send(link, header, *payload)

    monkeypatch.setattr(Link, "send", note)
    spec = job(segments=table_segments(10_000, 8, Adam(lr=0.02)), block_bytes=1 << 16)
    outcome = Rehearsal(spec, workers=2, servers=2, model=Lookup).run()
    assert outcome.status.state == "finished", outcome.log
    # 12 samples a step touch at most 24 rows of 36 bytes, and workers are sent those of two steps; whole are the first
    # two versions, and the counters
    assert sent[PUSH] <= 60 * (24 * 36 + 2 * 24)
    assert 0 < sent[PARAM_ROWS] <= 2 * 60 * 2 * 24 * 36
    assert sent[PARAM] == 2 * (2 * 320_000 + 61 * 24)


# --- torch --------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, *, sparse=True, tied=False):
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(40, 6, sparse=sparse)
        self.bag = nn.EmbeddingBag(30, 6, sparse=sparse, mode="sum")
        self.out = nn.Linear(6, 1)
        self.tied = tied

    def forward(self, words):
        hidden = self.table(words[:, :2]).sum(1) + self.bag(words[:, 2:])
        if self.tied:
            hidden = hidden + 0.05 * (hidden @ self.table.weight[:4].T) @ self.table.weight[:4]
        return self.out(hidden)


def texts():
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(30, (48, 4), generator=generator)
    return TensorDataset(words, torch.randn(48, 1, generator=generator))


def train(model, rule, **options):
    job = ElasticJob(model, optimizer=rule, dataset=texts(), batch_size=16, epochs=4, seed=4, **options)
    for words, targets in job:
        job.backward(functional.mse_loss(model(words), targets))
    return job


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(lr=0.05), lambda p: torch.optim.SGD(p, 0.05)),
        (Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, 0.01)),
    ],
    ids=["SGD", "SparseAdam"],
)
def test_tables_are_updated_as_torch_does_it(rule, make, mode):
    mine, theirs = Words(), Words()
    job = train(mine, rule, mode=mode)
    tables = make([theirs.table.weight, theirs.bag.weight])
    rest = torch.optim.SGD(theirs.out.parameters(), 0.05) if isinstance(rule, SGD) else torch.optim.Adam(
        theirs.out.parameters(), 0.01
    )  # fmt: skip
    model = Words()
    batches = ElasticJob(model, optimizer=SGD(lr=0.0), dataset=texts(), batch_size=16, epochs=4, seed=4, mode="fast")
    for words, targets in batches:
        batches.backward(functional.mse_loss(model(words), targets))
        theirs.zero_grad()
        functional.mse_loss(theirs(words), targets).backward()
        tables.step()
        rest.step()
    assert job.version == 12
    # Adam makes much of gradients that all but cancel; moments that decay in all rows would change weights by 0.01
    tolerance = 2e-6 if isinstance(rule, SGD) else 5e-4
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=tolerance)


def test_for_plain_sgd_it_is_the_same_as_with_all_rows():
    sparse, dense = Words(), Words(sparse=False)
    train(sparse, SGD(lr=0.05))
    train(dense, SGD(lr=0.05))
    for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_table_that_is_used_in_another_way_too():
    sparse, dense = Words(tied=True), Words(sparse=False, tied=True)
    train(sparse, SGD(lr=0.01))
    train(dense, SGD(lr=0.01))
    for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_tables_can_have_an_optimizer_of_their_own():
    with pytest.raises(SpecError, match=r"table\.weight is sparse: its optimizer"):
        train(Words(), SGD(lr=0.05, momentum=0.9))
    model = Words()
    group = Group([model.table.weight, model.bag.weight], Adam(lr=0.01))
    assert train(model, SGD(lr=0.05, momentum=0.9), groups=[group]).version == 12


def test_a_bundle_used_again_has_no_rows():
    spec = job(segments=table_segments(30, 2, SGD(lr=0.1)))
    session = SingleSession(spec)
    sums = GradientSums(spec, session.supply)
    for _ in range(2):
        sums.begin(1, (1,))
        bundle = sums.take()
        assert not bundle.rows[0].numbers.size
        bundle.rows[0] = Rows.of(np.array([1]), np.ones((1, 2), dtype=np.float32))
        sums.add(0, bundle)
