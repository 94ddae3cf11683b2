"""Memory of a worker for segments that plans add."""

from __future__ import annotations

from late_segments import added
from msgspec import structs
from own_loop import own_loop

from pslite.job.job_spec import SGD, Part
from pslite.worker.ps.model_buffers import ModelBuffers


def test_segments_of_a_plan_that_is_given_up_make_room_for_others():
    spec = own_loop()
    model = ModelBuffers(spec)
    first, second = added(SGD(lr=0.1))
    blocks = len(model.blocks)
    assert model.prepare(structs.replace(spec, segments=(*spec.segments, first))) == range(blocks, blocks + 12)
    assert len(model.weights.views) == blocks + 12
    assert model.prepare(spec) == range(blocks, blocks)
    assert len(model.weights.views) == blocks
    other = structs.replace(first, parts=(Part("other", (7,)),))
    model.prepare(structs.replace(spec, segments=(*spec.segments, first)))
    longer = structs.replace(spec, segments=(*spec.segments, other, second))
    assert model.prepare(longer) == range(blocks, blocks + 3)
    assert [array.size for array in model.weights.arrays[-2:]] == [7, 1]
    model.enter(blocks + 3)
    assert model.spec == longer
