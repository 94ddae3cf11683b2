"""Every control message that grows with the job fits into its limit: 40,000 blocks, 200 members, LAMB."""

from __future__ import annotations

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
    Finished,
    FromCoordinator,
    FromMember,
    Join,
    Norm,
    Prepare,
    Promote,
    Reassign,
    Saved,
    Trust,
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


SERVERS_THERE = [member("ps", i) for i in range(SERVERS)]
PLAN = make_plan(
    1, cut(SPEC), [member("worker", i) for i in range(WORKERS)], SERVERS_THERE, None, replicas=True
)  # fmt: skip
NUMBERS = tuple(range(BLOCKS))
GONE = tuple(each.task for each in SERVERS_THERE)
LATE = 2_000_000_000
#: messages to the coordinator, the worst case of each: one server has all blocks
FROM_MEMBERS = [
    Join(host=HOST, pid=LATE, address=f"{HOST}:65000", spec=SPEC),
    Copies(number=LATE, versions=dict.fromkeys(NUMBERS, LATE)),
    Saved(version=LATE, name="ps-0", sha256="0" * 64, blocks=NUMBERS),
    Norm(version=LATE, squares=dict.fromkeys(NUMBERS, (0.1, 0.2)), of="update"),
    Digests(blocks=dict.fromkeys(NUMBERS, b"0" * 32)),
    Finished(version=LATE, suspension_ms=[0.1] * 10_000),
]
FROM_COORDINATOR = [
    Prepare(plan=PLAN, previous=PLAN, spec=SPEC),
    Census(number=LATE, gone=GONE, blocks=NUMBERS),
    Promote.by_block(LATE, GONE, {number: SERVERS_THERE[number % SERVERS] for number in NUMBERS}),
    Trust(version=LATE, factors=dict.fromkeys(NUMBERS, 0.1)),
    Reassign(number=LATE, gone=GONE * 4, nodes={LATE - plan: tuple(range(2048)) for plan in range(4)}),
]


def test_the_job_is_that_large():
    assert len(cut(SPEC)) >= BLOCKS


@pytest.mark.parametrize(
    ("message", "types"),
    [*((each, FromMember) for each in FROM_MEMBERS), *((each, FromCoordinator) for each in FROM_COORDINATOR)],
    ids=lambda value: type(value).__name__,
)
def test_a_message_of_a_large_job_fits(message, types):
    data = frame(message)
    assert len(data) < MAX_CONTROL_BYTES
    assert Inbox(types, MAX_CONTROL_BYTES).feed(data) == [message]
