"""What a process hears that may not join a running job."""

from __future__ import annotations

import threading
import time

from rehearsal import Fault, Rehearsal, job, static_digest

from pslite.net.authentication import Identity, connect
from pslite.net.message_framing import Inbox, frame, receive_one
from pslite.net.messages import MAX_CONTROL_BYTES, Beat, FromCoordinator, Join, Refused


def test_a_newcomer_that_is_refused_hears_why_and_has_not_violated_the_protocol():
    """It sends a heartbeat before it has read that."""
    heard, threads = [], []

    def talk(rehearsal):
        identity = Identity(role="worker", task="worker-9", incarnation="9" * 32, token=rehearsal.token, encrypt="none")
        sock, _ = connect(rehearsal.address, identity, "control", timeout=20.0)
        with sock:
            sock.sendall(frame(Join(host="n", pid=1, spec=job(seed=8))) + frame(Beat()))
            heard.append(receive_one(sock, Inbox(FromCoordinator, MAX_CONTROL_BYTES), time.monotonic() + 20.0))
            # it reads on: the coordinator ends the connection with the job
            sock.settimeout(30.0)
            heard.append(sock.recv(1))

    def come(moment):
        threads.append(threading.Thread(target=talk, args=[moment.rehearsal]))
        threads[0].start()

    outcome = Rehearsal(job(), workers=1, servers=1, faults=[Fault("version", come, nth=20)], encrypt="none").run()
    threads[0].join()
    outcome.check(static_digest(job()))
    assert heard == [
        Refused(reason="its script describes another job than the first worker's: seed: 8 here, 7 there"), b""
    ]  # fmt: skip
    assert not any("violated the protocol" in line for line in outcome.log), outcome.story
