"""Registration over a network takes TLS."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from daemon.api.api_world import COMMAND, ApiWorld, error

from dl2d.core.errors import ConfigError
from dl2d.daemon.api import routes
from dl2d.daemon.api.server import ApiServer
from dl2d.testing.builders import OWNER
from pslite.errors import UsageError
from pslite.launch.registration import register


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificate")
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dl2d")])
    now = datetime.now(tz=UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, None)
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(*pem))
    return paths


@pytest.fixture
def world(certificate: tuple[Path, Path]) -> Iterator[ApiWorld]:
    world = ApiWorld(certificate=certificate)
    yield world
    world.close()


def body() -> dict[str, object]:
    return {"rm_id": "7", "proof": OWNER.user, "address": "host:1", **COMMAND}


def test_a_job_registers_over_https_and_verifies_the_daemon(world, certificate, monkeypatch):
    key = world.add_anchor()
    url = "https://{}:{}".format(*world.server.address)
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", str(certificate[0]))
    # As of a client on another machine.
    monkeypatch.setattr(routes, "is_loopback", lambda _: False)
    assert register(url, body, print).job == key.slug
    monkeypatch.delenv("DL2_DAEMON_CERTIFICATE")
    monkeypatch.setattr("pslite.launch.registration._REGISTER_SECONDS", 0.0)
    with pytest.raises(UsageError, match="CERTIFICATE_VERIFY_FAILED"):
        register(url, body, print)


def test_plain_http_is_refused_on_both_sides_unless_it_stays_on_this_machine(monkeypatch):
    for url in ("http://192.0.2.1:8910", "http://head.cluster:8910", "http://127.0.0.1.example:8910"):
        with pytest.raises(UsageError, match="https only"):
            register(url, body, print)
    world = ApiWorld()
    try:
        world.add_anchor()
        assert world.register().status_code == 200
        monkeypatch.setattr(routes, "is_loopback", lambda _: False)
        refused = world.register()
        assert (refused.status_code, "https only" in error(refused)) == (403, True)
    finally:
        world.close()


def test_a_certificate_that_cannot_be_used_is_told_at_the_start(certificate, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        ApiServer("127.0.0.1", 0, certificate=tmp_path / "none.pem", certificate_key=certificate[1])
    with pytest.raises(ConfigError, match=r"api\.certificate="):
        ApiServer("127.0.0.1", 0, certificate=certificate[1], certificate_key=certificate[0])
