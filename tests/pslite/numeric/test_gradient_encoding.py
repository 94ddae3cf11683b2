"""Gradients in 16 bits: rounded as torch rounds, half as long on the wire, and exact mode stays exact."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pslite_jobs import KillAt, command, run_job, static_digest
from rehearsal import job
from variants import first

from pslite.job.weight_blocks import cut
from pslite.numeric.gradient_encoding import Encoding, wire_bytes
from pslite.testing import Resize

floats = st.lists(st.floats(width=32) | st.integers(0, 2**32 - 1).map(lambda i: float(np.uint32(i).view("f4"))))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@given(values=floats)
@settings(max_examples=200)
def test_rounding_is_torchs_and_packing_loses_nothing_more(name, values):
    encoding = Encoding(name, 1)
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array.copy()).to(getattr(torch, name)).float().numpy()
    packed, back, rounded = np.empty(array.size, encoding.dtype), np.empty_like(array), array.copy()
    encoding.pack(array, packed)
    encoding.unpack(packed, back)
    encoding.round(rounded)
    np.testing.assert_array_equal(back, expected)
    np.testing.assert_array_equal(rounded, expected)
    again = rounded.copy()
    encoding.round(again)
    np.testing.assert_array_equal(again, rounded)


def test_long_arrays_are_worked_on_in_pieces():
    values = np.random.default_rng(1).standard_normal(100_003).astype(np.float32)
    for name in ("bfloat16", "float16"):
        encoding = Encoding(name, 1)
        rounded = values.copy()
        encoding.round(rounded)
        expected = torch.from_numpy(values).to(getattr(torch, name)).float().numpy()
        np.testing.assert_array_equal(rounded, expected)


def test_half_precision_holds_sums_of_large_batches():
    values = np.array([65504.0 * 4096, 1e-7 * 4096], dtype=np.float32)
    rounded = values.copy()
    Encoding("float16", 4096).round(rounded)
    np.testing.assert_allclose(rounded, values, rtol=0.2)
    Encoding("float16", 1).round(values)
    assert np.isinf(values[0])


def test_only_gradients_of_float32_weights_are_halved():
    spec = job(wire="bfloat16")
    assert {(b.dtype, wire_bytes(spec, b) / b.nbytes) for b in cut(spec)} == {("float32", 0.5), ("float64", 1.0)}
    assert all(wire_bytes(job(), b) == b.nbytes for b in cut(job()))


@pytest.mark.parametrize("transport", first(1, ("", "tcp")))
def test_in_fast_mode_it_comes_close(transport, tmp_path):
    save = tmp_path / "weights.npy"
    environ = {**os.environ, "DL2_TRANSPORT": transport}
    options = ("--mode", "fast", "--epochs", "10", "--wire", "bfloat16", "--step-seconds", "0.01")
    run_job(
        command(*options, "--save", str(save)), workers=3, servers=2, environ=environ,
        on_status=KillAt("worker-1", 20), schedule=[Resize(40, 2, 1, wait=False)],
    )  # fmt: skip
    exact = tmp_path / "exact.npy"
    assert static_digest("--epochs", "10", "--save", str(exact))
    np.testing.assert_allclose(np.load(save), np.load(exact), rtol=0.05, atol=0.01)
