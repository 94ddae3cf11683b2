"""Every control message that grows with the job fits into its limit: 40,000 blocks, 200 members, LAMB."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pslite.job.job_spec import LAMB, JobSpec, Part, Segment
from pslite.job.membership_plan import Member, make_plan
from pslite.job.weight_blocks import cut
from pslite.net.message_framing import Inbox, frame
from pslite.net.messages import (
    MAX_CONTROL_BYTES,
    Census,
    Copies,
    Digests,
    Factors,
    FromCoordinator,
    FromMember,
    Join,
    Norm,
    Prepare,
    Promote,
    Reassign,
    Saved,
)

BLOCKS, WORKERS, SERVERS = 40_000, 150, 50
HOST = "node-0123.partition.cluster.example.org"
#: one tensor in each block, with names as long as those of large models
PARTS = tuple(Part(f"model.language_model.layers.{i}.self_attn.q_proj.weight", (1024,)) for i in range(BLOCKS))
SPEC = JobSpec(
    segments=(Segment(dtype="float32", optimizer=LAMB(lr=0.01), parts=PARTS),), samples=10_000, batch=4096, epochs=2,
    seed=1, mode="exact", shards=1024, block_bytes=4096, durability="durable",
)  # fmt: skip


def member(role, number):
    name = f"{role}-{number}-of-job-123456"
    return Member(name, "0" * 32, HOST, 4_000_000, f"{HOST}:65000", "pslite-" + "0" * 32, "0" * 36 + "/4026531840")


@functools.cache
def messages() -> dict[str, Any]:
    """The worst case of each message, by the name of its type; to the coordinator: one server has all blocks."""
    servers = [member("ps", i) for i in range(SERVERS)]
    plan = make_plan(
        1, cut(SPEC), [member("worker", i) for i in range(WORKERS)], servers, None, replicas=True
    )  # fmt: skip
    numbers, gone, late = tuple(range(BLOCKS)), tuple(each.task for each in servers), 2_000_000_000
    made = (
        Join(host=HOST, pid=late, address=f"{HOST}:65000", spec=SPEC),
        Copies(number=late, versions=dict.fromkeys(numbers, late)),
        Saved(version=late, name="ps-0", sha256="0" * 64, blocks=numbers),
        Norm(version=late, squares=dict.fromkeys(numbers, (0.1, 0.2)), of="update"),
        Digests(blocks=dict.fromkeys(numbers, b"0" * 32)),
        Prepare(plan=plan, previous=plan, spec=SPEC),
        Census(number=late, gone=gone, blocks=numbers),
        Promote.by_block(late, gone, {number: servers[number % SERVERS] for number in numbers}),
        Factors(version=late, of="update", factors=dict.fromkeys(numbers, 0.1)),
        Reassign(number=late, gone=gone * 4, nodes={late - plan: tuple(range(2048)) for plan in range(4)}),
    )
    return {type(each).__name__: each for each in made}


def test_the_job_is_that_large():
    assert len(cut(SPEC)) >= BLOCKS


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        *((each, FromMember) for each in (Join, Copies, Saved, Norm, Digests)),
        *((each, FromCoordinator) for each in (Prepare, Census, Promote, Factors, Reassign)),
    ],
    ids=lambda value: getattr(value, "__name__", "Union"),
)
def test_a_message_of_a_large_job_fits(kind, types):
    message = messages()[kind.__name__]
    data = frame(message)
    assert len(data) < MAX_CONTROL_BYTES
    assert Inbox(types, MAX_CONTROL_BYTES).feed(data) == [message]
