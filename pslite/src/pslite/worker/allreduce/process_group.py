"""A process group of torch (gloo) for one plan, which can be given up at any time.

Its members find each other through the coordinator: what torch's rendezvous stores travels as messages on the
authenticated control connections, so that no store listens anywhere.  It is no default group: several may exist at a
time, and making one disturbs nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pslite.errors import PeerLost, UsageError

#: where the job has no progress deadline nothing ends by time: who waits looks at what the coordinator says meanwhile
_FOREVER = timedelta(days=30)
#: a receive that can only end by its time closes all connections of a group
_AT_ONCE = timedelta(milliseconds=1)
_STORE_SECONDS = 60.0
#: between two attempts to fail what is in the queues of a closed group, and how many there are
_CUT_SECONDS = 0.05
_CUTS = 60
#: until the memory of an operation that never ends is let go: no thread is about to begin it any more, however slow
_FORGET_SECONDS = 60.0
#: how long the end of a process may wait until a group's threads have ended
CLOSE_SECONDS = 10.0
#: and until one that is being made has failed, for which members may wait in vain
FAIL_SECONDS = 1.0

Bytes = NDArray[np.uint8]


class RelayStore(dist.Store):  # type: ignore[name-defined,misc]
    """What the members of a plan publish to each other.

    Parameters
    ----------
    publish
        sends a key and its value to the others.

    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._condition = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the plan was given up."""
        return self._closed

    def close(self) -> None:
        """Make everybody who waits for a key fail."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, key: str, value: bytes) -> None:
        """Take what another member has published."""
        with self._condition:
            self._values[key] = value
            self._condition.notify_all()

    # --- what torch calls ---------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.take(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._condition:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        with self._condition:
            here = self._condition.wait_for(
                lambda: self._closed or all(key in self._values for key in keys), _STORE_SECONDS
            )
            if self._closed or not here:
                raise PeerLost(
                    "the plan was given up"
                    if self._closed
                    else f"no worker published {keys} within {_STORE_SECONDS:g} s"
                )


class Work:
    """An operation on its way; `done` is set by another thread, which then calls `wake`."""

    def __init__(self, work: dist.Work, wake: Callable[[], None], keep: Sequence[torch.Tensor]) -> None:
        self._work = work
        #: memory that the operation uses
        self._keep = keep
        self.done = False

        def finished(_: Any) -> None:
            self.done = True
            wake()

        work.get_future().add_done_callback(finished)

    def forget(self) -> None:
        """Let go of the memory of an operation that never ends, all of whose connections are closed."""
        for tensor in self._keep:
            tensor.set_()  # type: ignore[call-overload]

    def result(self) -> None:
        """Raise ``PeerLost`` if the operation failed; call it when it is done."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error


class Group:
    """The connections among the workers of one plan.

    Parameters
    ----------
    rank
        this worker's place in it.
    size
        number of workers.
    store
        where they find each other.
    host
        name or address of the interface on which this process can be reached.
    wake
        called by other threads when an operation has ended.
    seconds
        how long an operation may take; 0: for ever.

    Raises
    ------
    PeerLost
        another member is gone, or the plan was given up.
    UsageError
        the interface does not exist.

    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: RelayStore,
        host: str,
        wake: Callable[[], None],
        seconds: float = 0.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._wake = wake
        self._backend: Any = None
        #: operations that may be under way
        self._works: list[Work] = []
        #: held while it is closed, or forgets: whoever joins then waits for all of it
        self._lock = threading.Lock()
        #: nothing of it comes back to Python any more
        self._gone = threading.Event()
        if size == 1:
            self._gone.set()
            return
        gloo: Any = dist.ProcessGroupGloo  # what is needed of it has no public name
        options = gloo._Options()  # noqa: SLF001
        options._timeout = timedelta(seconds=seconds) if seconds else _FOREVER  # noqa: SLF001
        try:
            options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
        except RuntimeError as error:
            problem = f"gloo cannot use {host!r}: {_first_line(error)}; set DL2_HOST to an address of this machine"
            raise UsageError(problem) from error
        try:
            self._backend = gloo(store, rank, size, options)
        except (RuntimeError, PeerLost) as error:
            raise PeerLost(_first_line(error)) from error

    def gather(self, mine: Sequence[int]) -> tuple[Work, NDArray[np.int64]]:
        """Bring every member's integers to everybody: shape (size, len(mine)), valid when the work is done."""
        every = np.empty((self.size, len(mine)), dtype=np.int64)
        into, own = torch.from_numpy(every), torch.tensor(list(mine), dtype=torch.int64)
        return self._begin(lambda: self._backend.allgather([list(into.unbind())], [own]), into, own), every

    def exchange(self, given: Bytes, give: Sequence[int], taken: Bytes, take: Sequence[int]) -> Work:
        """Send consecutive pieces of `given` to the members, of `give` bytes, and receive `take` bytes from each."""
        out, into = torch.from_numpy(given), torch.from_numpy(taken)
        return self._begin(lambda: self._backend.alltoall_base(into, out, list(take), list(give)), out, into)

    def broadcast(self, data: Bytes, root: int) -> Work:
        """Bring what the member `root` has in `data` into everybody's."""
        tensor = torch.from_numpy(data)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begin(lambda: self._backend.broadcast([tensor], options), tensor)

    def add(self, data: NDArray[Any]) -> Work:
        """Add up every member's `data`, in place; all get the same bits."""
        tensor = torch.from_numpy(data)
        return self._begin(lambda: self._backend.allreduce([tensor]), tensor)

    def close(self) -> None:
        """Fail what is under way, and close the connections: nothing is written into anybody's memory any more."""
        self._store.close()
        with self._lock:
            backend, self._backend = self._backend, None
            if backend is None:
                return
            self._cut(backend)
            # Torch's object waits for its threads when it goes: that is nobody's to wait for.
            closing = threading.Thread(target=self._drop, args=([backend],), name="pslite-group", daemon=True)
            del backend
            closing.start()

    def join(self, seconds: float) -> bool:
        """Wait until nothing of a closed group comes back to Python any more, and tell whether it is so.

        A process must not end before: a thread of Python's that comes out of torch then has the process aborted.
        """
        gone = self._gone.wait(seconds)
        with self._lock:
            return gone

    def _cut(self, backend: Any) -> None:
        # One that is closed already fails without closing the others.
        for other in set(range(self.size)) - {self.rank}:
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], other, 1).wait(_AT_ONCE)

    def _drop(self, holder: list[Any]) -> None:
        """Let go of torch's object, once what was waiting in its queues has failed too."""
        for _ in range(_CUTS):
            if all(work.done for work in self._works):
                self._works.clear()
                holder.clear()
                self._gone.set()
                return
            self._cut(holder[0])
            time.sleep(_CUT_SECONDS)
        # Gloo (signalException in transport/tcp/pair.cc) does not tell a send that is not all written that its
        # connection broke: a thread waits for it for ever. So would the object's end: it is to have none.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder[0]))
        self._gone.set()
        time.sleep(_FORGET_SECONDS)
        with self._lock:
            for work in self._works:
                if not work.done:
                    work.forget()
            self._works.clear()

    def _begin(self, start: Callable[[], dist.Work], *keep: torch.Tensor) -> Work:
        if self._backend is None:
            raise PeerLost("the group is closed")
        try:
            work = Work(start(), self._wake, keep)
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error
        self._works = [earlier for earlier in self._works if not earlier.done] + [work]
        return work


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:500]
