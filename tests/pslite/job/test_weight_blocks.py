"""How the segments of a job are cut into blocks."""

from __future__ import annotations

import pytest
from msgspec import structs
from own_loop import own_loop

from pslite.errors import SpecError
from pslite.job.job_spec import SGD, Part, Segment
from pslite.job.weight_blocks import cut


def test_a_late_segment_has_blocks_of_its_own_size():
    spec = own_loop()
    late = Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("a", (1000,)),), late=True, block_bytes=1600)
    blocks = cut(structs.replace(spec, segments=(*spec.segments, late)))
    before = cut(spec)
    assert blocks[: len(before)] == before
    assert [block.size for block in blocks[len(before) :]] == [400, 400, 200]


def test_a_model_of_too_many_blocks_is_refused():
    spec = own_loop(block_bytes=1024)
    late = Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("a", (30_000_000,)),), late=True)
    with pytest.raises(SpecError, match="has 117190 blocks, each of which costs every step a message"):
        structs.replace(spec, segments=(*spec.segments, late))
    large = structs.replace(late, block_bytes=1 << 20)
    assert len(cut(structs.replace(spec, segments=(*spec.segments, large)))) < 200
