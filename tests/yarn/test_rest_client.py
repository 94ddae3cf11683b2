"""The client of the ResourceManager: fail-over, limits of time and size, and errors."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from yarn.rm_answers import client_of, lists, raw_server

from dl2d.core.errors import ConfigError, Denied, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d_yarn.cluster_listing import read_version
from dl2d_yarn.rest_client import MAX_REDIRECTS, RestClient

TWO = ["http://rm1:8088", "http://rm2:8088"]


def test_identity_is_sent_and_the_body_is_json() -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(202, content=b"{}")

    client = client_of(answer)
    client.send("PUT", "/app/v1/services/s", {"state": "FLEX"}, do_as="ml")
    client.get("/x", dict, parameters={"a": "b&c"}, do_as="dl2d")
    assert dict(seen[0].url.params) == {"user.name": "dl2d", "doAs": "ml"}
    assert json.loads(seen[0].content) == {"state": "FLEX"}
    assert dict(seen[1].url.params) == {"user.name": "dl2d", "a": "b&c"}


def test_a_standby_redirects_and_the_body_is_sent_again() -> None:
    bodies = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.host == "rm1":
            return httpx2.Response(307, headers={"Location": str(request.url.copy_with(host="rm2"))})
        bodies.append((request.method, request.content, request.url.params["user.name"]))
        return httpx2.Response(202)

    client_of(answer, addresses=TWO).send("POST", "/app/v1/services", {"name": "s"})
    assert bodies == [("POST", b'{"name":"s"}', "dl2d")]


def test_the_address_that_answered_is_asked_first_next_time() -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        if request.url.host == "rm1":
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, content=b"{}")

    client = client_of(answer, addresses=TWO)
    for _ in range(2):
        client.get("/x", dict)
    assert asked == ["rm1", "rm2", "rm2"]


def test_the_address_to_which_a_standby_redirected_is_asked_first_next_time() -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        if request.url.host != "rm2":
            return httpx2.Response(307, headers={"Location": str(request.url.copy_with(host="rm2"))})
        return httpx2.Response(200, content=b"{}")

    client = client_of(answer, addresses=["http://rm3:8088", *TWO])
    for _ in range(2):
        client.get("/x", dict)
    assert asked == ["rm3", "rm2", "rm2"]


def test_threads_that_change_the_order_of_addresses_do_not_disturb_each_other(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    addresses = [f"http://rm{number}:8088" for number in range(8)]
    hosts = iter(range(10_000))
    failed: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.host != f"rm{next(hosts) % 8}":
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(200, content=b"{}")

    client = client_of(answer, addresses=addresses)

    def call() -> None:
        for _ in range(40):
            try:
                client.get("/x", dict)
            except Unavailable as error:
                failed.extend([] if all(each in str(error) for each in addresses) else [str(error)])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_change_is_sent_to_the_next_address_where_no_connection_was_made() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.host == "rm1":
            raise httpx2.ConnectTimeout("no answer", request=request)
        return httpx2.Response(202, content=b"done")

    assert client_of(answer, addresses=TWO).send("POST", "/app/v1/services", {}) == b"done"


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_authorities_that_cannot_be_read_are_told(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"resource_manager\.yarn\.ca_file: .*ca\.pem cannot be used"):
        RestClient(TWO, user="dl2d", timeout_seconds=1, ca_file=str(file))


def test_a_change_that_may_have_been_heard_is_not_sent_twice() -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        raise httpx2.ReadTimeout("slow", request=request)

    with pytest.raises(Unavailable, match="may have been carried out"):
        client_of(answer, addresses=TWO).send("POST", "/app/v1/services", {})
    assert asked == ["rm1"]


@pytest.mark.parametrize(
    "location", ["http://rm:8088/again", "", "ftp://rm/x", "http://", "http://[::bad", "https://rm:99999999/"]
)
def test_redirects_end(location: str) -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return httpx2.Response(307, headers={"Location": location})

    with pytest.raises(Unavailable):
        client_of(answer).get("/x", dict)
    assert len(asked) <= 1 + MAX_REDIRECTS


@pytest.mark.parametrize(
    ("addresses", "location"),
    [
        (["https://rm1:8090", "http://rm2:8088"], "http://rm2:8088/x"),  # gives up TLS
        (["http://rm1:8088"], "http://rm2:8088/x"),
        (["http://rm1:8088"], "http://rm1:8042/x"),
        (["http://rm1:8088"], "http://rm1:8088@eve/x"),
    ],
)
def test_redirects_to_other_than_the_configured_addresses_are_refused(addresses: list[str], location: str) -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        return httpx2.Response(307, headers={"Location": location if len(asked) == 1 else "/none"})

    with pytest.raises(Unavailable, match=r"redirects to .*, which is refused: it is none of resource_manager"):
        client_of(answer, addresses=addresses).send("PUT", "/x", {})
    assert asked[0] == "rm1"
    assert "eve" not in asked


def test_a_redirect_chooses_neither_path_nor_user() -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        if len(asked) > 1:
            return httpx2.Response(202)
        return httpx2.Response(307, headers={"Location": "http://rm2:8088/app/v1/services/other?doAs=alice"})

    client_of(answer, addresses=TWO).send("PUT", "/app/v1/services/own", {})
    assert asked == [f"{address}/app/v1/services/own?user.name=dl2d" for address in TWO]


def test_after_a_redirect_that_is_refused_the_next_address_is_asked() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.host == "rm1":  # names the active one as yarn-site.xml does, and the settings do not
            return httpx2.Response(307, headers={"Location": "http://rm2.cluster:8088/x"})
        return httpx2.Response(202, content=b"done")

    assert client_of(answer, addresses=TWO).send("POST", "/x", {}) == b"done"


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (401, b"<html>Authentication required</html>", Denied, "Authentication required"),
        (403, b'{"RemoteException":{"message":"dl2d is not allowed to impersonate root"}}', Denied, "impersonate root"),
        (404, b'{"diagnostics":"Service s not found","code":404004}', NotFound, "Service s not found"),
        (400, b'{"diagnostics":"Invalid character"}', Rejected, "Invalid character"),
        (500, b'{"diagnostics":"unknown queue"}', Rejected, "unknown queue"),
        (500, b'{"diagnostics":"Cannot create directory. Name node is in safe mode."}', Unavailable, "safe mode"),
        (500, b'{"RemoteException":{"exception":"RetriableException","message":"again"}}', Unavailable, "again"),
        (500, b"<html>NullPointerException\x1b[31m</html>", Unavailable, "NullPointerException [31m"),
        (503, b"", Unavailable, "503"),
        (299, b"nonsense", Unavailable, "cannot be read"),
    ],
)  # fmt: skip
def test_errors_say_what_the_resource_manager_said(
    status: int, body: bytes, error: type[ResourceManagerError], said: str
) -> None:
    with pytest.raises(error) as caught:
        client_of(lambda _request: httpx2.Response(status, content=body)).get("/x", dict)
    assert said in str(caught.value)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        (HEAD % 100 + b'{"apps":', {}),  # cut off
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{}", {}),
        (b"\x15\x03\x01\x00\x02\x02", {}),  # TLS
        (b"", {}),
        (b"", {"pause": 3.0}),  # nothing comes
        (HEAD % 400 + b" " * 400, {"pause": 0.05, "step": 10}),  # so slow that no single read takes too long
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 400, {"pause": 0.05, "step": 1}),  # the same in the headers
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 40, {"pause": 0.05, "step": 25}),
        (HEAD % 200_000 + b" " * 200_000, {}),  # too large
    ],
)
def test_broken_answers_are_no_answers(answer: bytes, options: dict[str, Any]) -> None:
    with raw_server(answer, **options) as address:
        client = RestClient([address], user="dl2d", timeout_seconds=0.4, max_answer_bytes=100_000)
        begin = time.monotonic()
        with client, pytest.raises(Unavailable):
            client.get("/ws/v1/cluster/apps", dict)
        assert time.monotonic() - begin < 2.0


def test_a_dead_address_is_unavailable() -> None:
    with (
        RestClient(["http://127.0.0.1:1"], user="dl2d", timeout_seconds=1) as client,
        pytest.raises(Unavailable, match="no ResourceManager answers"),
    ):
        client.get("/x", dict)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https_is_verified_with_the_given_authority(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(lists()["/ws/v1/cluster/info"]).encode())

        def log_message(self, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = [f"https://localhost:{server.server_port}"]
        with RestClient(address, user="dl2d", timeout_seconds=5, ca_file=str(certificate)) as client:
            assert read_version(client) == "3.4.2"
        with (
            RestClient(address, user="dl2d", timeout_seconds=5) as client,
            pytest.raises(Unavailable, match=r"(?i)certificate"),
        ):
            read_version(client)
        server.shutdown()
