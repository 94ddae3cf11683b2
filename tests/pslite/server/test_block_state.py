"""Buffers of a parameter server."""

from __future__ import annotations

import weakref

import numpy as np

from pslite.server.block_state import BufferPool


def test_buffers_may_be_reserved_while_others_are_freed():
    """Plans are prepared in a thread of their own."""
    pool = BufferPool()
    reserved = np.zeros(3, dtype=np.float32)
    for size in (1, 2):
        buffer = np.zeros(size, dtype=np.float32)
        weakref.finalize(buffer, pool.give, reserved)
        pool.give(buffer)
    del buffer
    pool.trim([])
    assert pool.take(reserved) is reserved
