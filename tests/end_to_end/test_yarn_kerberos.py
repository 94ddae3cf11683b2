"""A ResourceManager that demands Kerberos, with a real key distribution centre."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator

import kerberos_realm
import pytest
import yarn_cluster
from kerberos_realm import REALM, KerberosRealm

from dl2d.core.errors import Denied, Unavailable
from dl2d_yarn.cluster_check import check_cluster
from dl2d_yarn.cluster_listing import SERVICES_PATH, read_listing, read_version
from dl2d_yarn.rest_client import RestClient, Spnego
from dl2d_yarn.settings import YarnSettings


def _why_not() -> str:
    gssapi = "" if importlib.util.find_spec("gssapi") else "the Python package gssapi is not installed"
    return yarn_cluster.why_not() or kerberos_realm.why_not() or gssapi


pytestmark = [
    pytest.mark.slow,
    pytest.mark.yarn,
    pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "Kerberos is there"),
]
SERVICE = {
    "name": "of-ml",
    "version": "1",
    "components": [
        {"name": "main", "number_of_containers": 1, "launch_command": "sleep 600",
         "resource": {"cpus": 1, "memory": "64"}},
    ],
}  # fmt: skip
Open = Callable[..., RestClient]


@pytest.fixture(scope="module")
def realm() -> Iterator[KerberosRealm]:
    with kerberos_realm.realm_for_this_process() as realm:
        yield realm


@pytest.fixture(scope="module")
def settings(realm: KerberosRealm) -> Iterator[YarnSettings]:
    secret = realm.folder / "signature-secret"
    secret.write_text("a secret of the tests")
    keytab = realm.keytab("dl2d")
    http = "hadoop.http.authentication"
    core = {
        f"{http}.type": "kerberos",
        f"{http}.kerberos.principal": f"HTTP/localhost@{REALM}",
        f"{http}.kerberos.keytab": realm.keytab("HTTP/localhost"),
        f"{http}.signature.secret.file": str(secret),
        "hadoop.proxyuser.dl2d.users": "ml",
    }
    cluster = yarn_cluster.YarnCluster(nodes=1, core=core, krb5_conf=str(realm.conf))
    cluster.addresses["rm"] = cluster.address.replace("127.0.0.1", "localhost")
    cluster.auth = Spnego(f"dl2d@{REALM}", keytab)
    with cluster:
        yield YarnSettings.parse({"addresses": [cluster.address], "principal": f"dl2d@{REALM}", "keytab": keytab})


def test_the_daemon_is_known_by_its_keytab_and_others_are_refused(settings: YarnSettings, realm: KerberosRealm) -> None:
    with RestClient.of(settings) as client:
        assert read_version(client).startswith("3.")
        assert len(read_listing(client).nodes) == 1
        client.send("POST", SERVICES_PATH, SERVICE, do_as="ml")
        assert [(app.user, app.name) for app in read_listing(client).applications] == [("ml", "of-ml")]
        with pytest.raises(Denied, match=r"dl2d has no permission to act for root; set hadoop\.proxyuser\.dl2d\.hosts"):
            client.send("DELETE", f"{SERVICES_PATH}/of-ml", do_as="root")
        client.send("DELETE", f"{SERVICES_PATH}/of-ml", do_as="ml")
    with (
        RestClient(settings.addresses, user="dl2d", timeout_seconds=20) as without_ticket,
        pytest.raises(Denied, match="401"),
    ):
        read_version(without_ticket)
    stranger = Spnego(f"eve@{REALM}", realm.keytab("eve"))
    with (
        RestClient(settings.addresses, user="eve", timeout_seconds=20, auth=stranger) as client,
        pytest.raises(Denied, match="eve has no permission to act for ml"),
    ):
        client.send("DELETE", f"{SERVICES_PATH}/of-ml", do_as="ml")
    items = {item: (good, text) for item, good, text in check_cluster(settings)}
    assert items["yarn cluster"][0]
    assert items["yarn services"][0]


def test_a_ticket_that_has_expired_is_renewed(settings: YarnSettings, realm: KerberosRealm) -> None:
    short = Spnego(f"short@{REALM}", realm.keytab("short", "-maxlife", "3 seconds"))
    for pause in (4, 0):
        with RestClient(settings.addresses, user="short", timeout_seconds=20, auth=short) as client:
            assert read_version(client)
        time.sleep(pause)


def test_a_keytab_that_the_realm_does_not_know_is_told(settings: YarnSettings, realm: KerberosRealm) -> None:
    wrong = Spnego(f"nobody@{REALM}", settings.keytab)
    with (
        RestClient(settings.addresses, user="nobody", timeout_seconds=20, auth=wrong) as client,
        pytest.raises(Unavailable, match=f"no Kerberos ticket of nobody@{REALM} for HTTP@localhost"),
    ):
        read_version(client)
