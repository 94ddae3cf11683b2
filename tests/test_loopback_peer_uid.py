"""Which account has the port of a URL without TLS, before a secret is sent there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from dl2d.cli.daemon_access import job_api_client
from dl2d.cli.daemon_access.job_api_client import DaemonClient
from dl2d.cli.daemon_access.read_daemon_health import daemon_health
from dl2d.config.settings import load_settings
from dl2d.core.errors import Unavailable
from dl2d.daemon.key_and_address_files import load_credentials
from pslite.launch.daemon_connection import daemon_http
from pslite.launch.daemon_connection.daemon_http import UID_VARIABLE, check_peer, fetch, trusted_accounts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is")
OTHER = 65_432
_SERVE = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    with server.accept()[0] as connection:
        print(connection.recv(1000), flush=True)
"""


class Recorder:
    """Server that keeps what it receives, and gives always the same answer, by default none; a context manager."""

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.received: list[bytes] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> list[bytes]:
        """Stop, and return what came; may be called again."""
        if self._thread.is_alive():
            self.server.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self.server.close()
        return self.received

    def _serve(self) -> None:
        while True:
            try:
                connection = self.server.accept()[0]
            except OSError:
                return
            with connection:
                self.received.append(connection.recv(1000))
                connection.sendall(self.answer)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as made:
        yield made


def test_no_request_goes_to_a_program_of_another_account(recorder: Recorder, tmp_path: Path, monkeypatch) -> None:
    for module in (daemon_http, job_api_client):
        monkeypatch.setattr(module, "trusted_accounts", lambda *_: frozenset({OTHER}))
    config = tmp_path / "dl2d.yaml"
    config.write_text(f"state_dir: {tmp_path}\napi:\n  port: {recorder.port}\n")
    settings = load_settings(config)
    load_credentials(settings.secret_path, create=True)
    whose = f"port {recorder.port} belongs to uid {os.geteuid()}"

    with pytest.raises(OSError, match=whose):
        fetch(f"http://127.0.0.1:{recorder.port}/v1/register", {"proof": "MUNGE:x"}, credential="ab" * 32, timeout=5)
    health = daemon_health(settings, 5)
    assert not health.runs
    assert whose in health.text
    with DaemonClient(settings) as client, pytest.raises(Unavailable, match=whose):
        client.cancel("lab.1.1")
    assert recorder.close() == [b""] * 3


def test_whoever_may_not_look_for_the_key_sees_a_daemon_of_another_account(tmp_path: Path, monkeypatch) -> None:
    """It has no secret to protect, and the key file does not tell whose the daemon is."""
    monkeypatch.setattr(job_api_client, "trusted_accounts", lambda *_: frozenset({OTHER}))
    content = json.dumps({"version": "1", "cluster": "lab", "slot": 7, "problems": []}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with Recorder(head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)) as recorder:
        config = tmp_path / "dl2d.yaml"
        config.write_text(f"state_dir: {tmp_path}\napi:\n  port: {recorder.port}\n")
        health = daemon_health(load_settings(config), 5)
        assert health.runs
        assert "slot 7" in health.description
        assert b"Bearer none" in recorder.close()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another account")
def test_an_account_is_trusted_only_if_it_is_known_to_be_the_daemons(monkeypatch) -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVE, str(OTHER)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with pytest.raises(OSError, match=f"belongs to uid {OTHER}"):
                fetch(f"http://127.0.0.1:{port}", credential="secret", timeout=5)
            assert process.stdout.readline() == "b''\n"
            monkeypatch.setenv(UID_VARIABLE, str(OTHER))  # as the address file says
            with pytest.raises(OSError, match=r"closed|reset"):
                fetch(f"http://127.0.0.1:{port}", credential="secret", timeout=5)
            assert "Bearer secret" in process.stdout.readline()
        finally:
            process.kill()


def test_a_connection_that_is_not_accepted_yet_is_waited_for() -> None:
    """Linux gives root as its account until then."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        with pytest.raises(TimeoutError, match="did not accept the connection"):
            check_peer(connection, {0, os.geteuid()}, 0.05)
        accepted: list[socket.socket] = []
        timer = threading.Timer(0.1, lambda: accepted.append(server.accept()[0]))
        timer.start()
        check_peer(connection, {os.geteuid()}, 10)
        timer.join()
        accepted[0].close()


def test_a_connection_that_is_accepted_and_closed_at_once_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        server.accept()[0].close()
        assert connection.recv(1) == b""
        with pytest.raises(ConnectionResetError, match="closed the connection at once"):
            check_peer(connection, {0, os.geteuid()}, 60)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_that_listens_on_ipv6_too_is_recognized(host: str) -> None:
    try:
        server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, socket.create_connection((host, server.getsockname()[1])) as connection, server.accept()[0]:
        check_peer(connection, {os.geteuid()}, 5)
        with pytest.raises(PermissionError):
            check_peer(connection, {OTHER}, 5)


def test_root_ourselves_and_the_daemons_account_are_trusted(monkeypatch) -> None:
    monkeypatch.setenv(UID_VARIABLE, "991")
    assert {0, os.geteuid(), 991, 7} <= trusted_accounts(7)
    monkeypatch.setenv(UID_VARIABLE, "none")
    assert OTHER not in trusted_accounts()
