"""Kerberos tickets for calls to a ResourceManager, with a real key distribution centre."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import subprocess
from collections.abc import Iterator

import httpx2
import kerberos_realm
import pytest
from kerberos_realm import REALM, KerberosRealm
from yarn.rm_answers import client_of

from dl2d.core.errors import Unavailable
from dl2d_yarn import rest_client
from dl2d_yarn.rest_client import RestClient, Spnego
from dl2d_yarn.settings import YarnSettings


def _why_not() -> str:
    return kerberos_realm.why_not() or (
        "" if importlib.util.find_spec("gssapi") else "the Python package gssapi is not installed"
    )


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "Kerberos is there")


@pytest.fixture
def realm() -> Iterator[KerberosRealm]:
    with kerberos_realm.realm_for_this_process() as realm:
        yield realm


def test_a_users_client_takes_the_ticket_that_the_cache_has(
    realm: KerberosRealm, monkeypatch: pytest.MonkeyPatch
) -> None:
    gssapi = importlib.import_module("gssapi")
    store = {"keytab": realm.keytab("HTTP/localhost")}
    server = gssapi.Credentials(usage="accept", store=store)
    users = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Negotiate":
            return httpx2.Response(401, headers={"WWW-Authenticate": "Negotiate"})
        context = gssapi.SecurityContext(creds=server, usage="accept")
        context.step(base64.b64decode(token))
        users.append((str(context.initiator_name), dict(request.url.params)))
        return httpx2.Response(200, content=b"{}")

    settings = YarnSettings.parse(
        {"addresses": ["http://localhost:8088"], "principal": f"dl2d@{REALM}", "keytab": "/no/such"}
    )
    monkeypatch.setattr(
        rest_client.httpx2,
        "Client",
        lambda **options: _CLIENT(**{**options, "transport": httpx2.MockTransport(answer)}),
    )
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{realm.folder}/cache")
    with RestClient.of(settings, as_caller=True) as client:
        with pytest.raises(Unavailable, match="no Kerberos ticket of this account for HTTP@localhost"):
            client.send("POST", "/app/v1/services", {})
        subprocess.run(["kinit", "-k", "-t", realm.keytab("alice"), "alice"], check=True)
        client.send("POST", "/app/v1/services", {})
    assert users == [(f"alice@{REALM}", {})]
    with (
        client_of(answer, addresses=settings.addresses, auth=Spnego(f"dl2d@{REALM}", "")) as daemon,
        pytest.raises(Unavailable, match=f"no Kerberos ticket of dl2d@{REALM}"),
    ):
        daemon.get("/x", dict)


_CLIENT = httpx2.Client
