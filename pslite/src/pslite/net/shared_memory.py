"""Memory that processes of one machine share: anonymous files of a fixed size, which only their makers write to.

A worker has one for each bundle of gradients, a server one for the state of the blocks that a plan gives it.  Nobody
finds it by a name: who has authenticated itself over a Unix socket is given its descriptor over the same (SCM_RIGHTS,
unix(7)).  It is sealed (memfd_create(2)), so that its size cannot change under a reader, which would end it by SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pslite.errors import ProtocolError
from pslite.job.job_spec import ITEM_BYTES, JobSpec
from pslite.job.weight_blocks import Block

Array = NDArray[Any]

#: set to "tcp" or "unix" to share no memory
VARIABLE = "DL2_TRANSPORT"
#: arrays begin at multiples of a cache line
_ALIGN = 64


class Layout:
    """Where the arrays of a job's segments and its blocks lie in a region: byte offsets."""

    def __init__(self, spec: JobSpec, blocks: Sequence[Block]) -> None:
        self.arrays: list[int] = []
        end = 0
        for segment in spec.segments:
            self.arrays.append(end)
            end += -(-segment.nbytes // _ALIGN) * _ALIGN
        self.nbytes = end
        self.blocks = [self.arrays[b.segment] + b.offset * ITEM_BYTES[b.dtype] for b in blocks]


class SharedMemory:
    """Shared memory of this process' making, or a plain piece of its own memory where there is none to be had.

    Parameters
    ----------
    nbytes
        its size.
    shared
        False for memory of this process alone: the system gives it in half the time.

    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        self.nbytes = nbytes
        #: its descriptor; -1 for a plain piece of memory
        self.fd = -1
        self.memory: memoryview | mmap.mmap
        if shared and os.environ.get(VARIABLE) not in ("tcp", "unix") and nbytes:
            try:
                self.fd = _sealed(nbytes)
                self.memory = mmap.mmap(self.fd, nbytes)
            except (OSError, AttributeError):
                self.close()
        if self.fd < 0:
            # numpy would ask for huge pages: where a host takes back what its guests have freed, those cost most
            self.memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if nbytes else memoryview(b"")

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a process has it mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _sealed(nbytes: int) -> int:
    fd = os.memfd_create("pslite", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Arena:
    """The memory of a server for the state of some blocks, whose weights workers of the machine may look at.

    Parameters
    ----------
    number
        by which workers know it.
    sizes
        bytes of the state of each block, by its number.

    """

    def __init__(self, number: int, sizes: Mapping[int, int]) -> None:
        self.number = number
        #: where the state of a block begins, in pages, by number of the block
        self.page_offsets: dict[int, int] = {}
        end = 0
        for block, nbytes in sizes.items():
            self.page_offsets[block] = end
            end += -(-nbytes // mmap.PAGESIZE)
        self.region = SharedMemory(end * mmap.PAGESIZE)
        self._sizes = sizes
        self._kept = False

    def state(self, block: Block) -> Array:
        """Return the memory for a block, all zero, shape (1 + slots, size); once.

        It goes back to the system with the last array that lies in it.
        """
        begin, memory = self.page_offsets[block.number] * mmap.PAGESIZE, self.region.memory
        # numpy keeps this very object, unlike a slice of a memoryview
        piece = (ctypes.c_char * self._sizes[block.number]).from_buffer(memory, begin)
        if isinstance(memory, mmap.mmap):
            weakref.finalize(piece, self._give_back, memory, begin, ctypes.sizeof(piece)).atexit = False
        found: Array = np.frombuffer(memoryview(piece), dtype=block.dtype).reshape(-1, block.size)
        return found

    def keep(self) -> None:
        """Give nothing back from now on: this process ends, and a worker may still be about to read."""
        self._kept = True

    def _give_back(self, memory: mmap.mmap, begin: int, nbytes: int) -> None:
        if not self._kept:
            with contextlib.suppress(OSError, ValueError):
                memory.madvise(mmap.MADV_REMOVE, begin, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


class MappedMemory:
    """A peer's region, seen from here; it cannot be written to.

    Parameters
    ----------
    fd
        its descriptor; owned here from now on, and closed here.

    Raises
    ------
    ProtocolError
        it is not what a peer may hand over.

    """

    def __init__(self, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            # Pages of a huge size may not be there when they are touched, which ends a process.
            if not seals & fcntl.F_SEAL_SHRINK or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
                raise ProtocolError("the received shared memory is not sealed: its size could change")
            self.nbytes = os.fstat(fd).st_size
            self._memory = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise ProtocolError(f"the received descriptor cannot be mapped as shared memory: {error}") from error
        finally:
            os.close(fd)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Unmap pages that were read from this process's resident memory; `offset` is that of a page.

        Their content stays in the shared memory.  Resource managers would count it once for each process of a job in
        whose resident memory it is.
        """
        self._memory.madvise(mmap.MADV_DONTNEED, offset, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def array(self, block: Block, offset: int) -> Array:
        """Return the memory of a block as an array, whose bytes begin at an offset.

        Raises `ProtocolError` if it does not lie inside.
        """
        if offset + block.nbytes > self.nbytes:
            raise ProtocolError(f"block {block.number} does not lie within shared memory of {self.nbytes} bytes")
        found: Array = np.frombuffer(self._memory, dtype=block.dtype, count=block.size, offset=offset)
        return found
