"""Groups of torch whose members die: whatever becomes of what is under way, the others end as they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from pslite.errors import PeerLost
from pslite.worker.allreduce.process_group import Group, RelayStore

#: One of two members stands still when it is to receive more than a connection holds, and is killed: gloo never ends
#: that send.
KILLED = """
import os, signal, threading, time, weakref
from multiprocessing import Pipe
import numpy as np
import pslite.worker.allreduce.process_group
from pslite.worker.allreduce.process_group import Group, RelayStore

pslite.worker.allreduce.process_group._FORGET_SECONDS = 0.0
pslite.worker.allreduce.process_group._CUTS = 5
ends = Pipe()
child = os.fork()
rank = int(child == 0)
store = RelayStore(lambda key, value: ends[rank].send((key, value)))

def hear():
    while True:
        store.take(*ends[rank].recv())

threading.Thread(target=hear, daemon=True).start()
group = Group(rank, 2, store, "127.0.0.1", lambda: None)
nothing, data = np.zeros(0, np.uint8), np.zeros(1 << 26, np.uint8)
if rank:
    group.exchange(nothing, [0, 0], data, [data.size, 0])
    # until its thread has said that we are ready to receive
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
work = group.exchange(data, [0, data.size], nothing, [0, 0])
# until the connection is full
time.sleep(0.2)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
forgotten = threading.Event()
weakref.finalize(data, forgotten.set)
del data, work
group.close()
print(group.join(60.0), forgotten.wait(60.0), group.join(60.0))
"""


def test_a_send_that_never_ends_keeps_neither_memory_nor_the_end_of_its_process():
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=200)
    finally:
        # The member that stands still, if the other one failed before it killed it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, said) == (0, "True True True\n"), errors


def test_an_operation_in_which_another_member_takes_no_part_ends_in_time():
    stores: list[RelayStore] = []
    stores += [RelayStore(lambda key, value, other=1 - rank: stores[other].take(key, value)) for rank in (0, 1)]
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: Group(rank, 2, stores[rank], "127.0.0.1", done.set, 1.0), (0, 1)))
    work = groups[0].add(np.ones(4, np.float32))
    assert done.wait(60)
    with pytest.raises(PeerLost, match=r"(?i)timed out"):
        work.result()
    for group in groups:
        group.close()
    assert all(group.join(60.0) for group in groups)
