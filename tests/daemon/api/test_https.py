"""Registration over a network takes TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest
from daemon.api.api_world import COMMAND, ApiWorld, error
from self_signed import self_signed

from dl2d.cli.daemon_access.job_api_client import daemon_trust
from dl2d.cli.daemon_access.read_daemon_health import ask_health
from dl2d.config.settings import ApiSettings, Settings
from dl2d.core.errors import ConfigError
from dl2d.daemon.api import bearer_authentication
from dl2d.daemon.api.http_server import ApiServer
from dl2d.daemon.api.tls_certificate import served_certificate_problem
from dl2d.daemon.key_and_address_files import write_address
from dl2d.testing import OWNER
from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress, renew_certificate
from pslite.launch.daemon_connection.daemon_http import certificate_text
from pslite.launch.daemon_connection.job_registration import register
from pslite.launch.daemon_connection.membership_from_daemon import DaemonClient, report_failure


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1."""
    return self_signed(tmp_path_factory.mktemp("certificate"))


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
    monkeypatch.setattr(bearer_authentication, "is_loopback", lambda _: False)
    assert register(url, body, print).job == key.slug
    monkeypatch.delenv("DL2_DAEMON_CERTIFICATE")
    monkeypatch.setattr("pslite.launch.daemon_connection.job_registration._REGISTER_SECONDS", 0.0)
    with pytest.raises(UsageError, match="CERTIFICATE_VERIFY_FAILED"):
        register(url, body, print)


def test_a_certificate_that_the_daemon_gives_is_trusted_and_one_that_replaces_a_file_too(
    world, certificate, tmp_path, monkeypatch
):
    key = world.add_anchor()
    url = "https://{}:{}".format(*world.server.address)
    # Certificate and key may be one file: a job gets the certificate alone.
    both = certificate_text(certificate[0].read_text() + certificate[1].read_text())
    assert both == world.server.certificates == certificate_text(certificate[0].read_text())
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", both)
    assert register(url, body, print).job == key.slug
    other, _ = self_signed(tmp_path)
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", str(other))
    monkeypatch.setattr("pslite.launch.daemon_connection.job_registration._REGISTER_SECONDS", 0.0)
    with pytest.raises(UsageError, match="CERTIFICATE_VERIFY_FAILED"):
        register(url, body, print)
    other.write_bytes(certificate[0].read_bytes())
    assert register(url, body, print).job == key.slug


def test_a_job_takes_the_new_certificate_of_its_daemon_from_the_address_file(world, certificate, tmp_path, monkeypatch):
    world.add_anchor()
    url = "https://{}:{}".format(*world.server.address)
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", world.server.certificates)
    registered = register(url, body, print)
    before, _ = self_signed(tmp_path)
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", certificate_text(before.read_text()))
    file = tmp_path / "job-api.json"
    # Of another daemon: not taken.
    write_address(file, DaemonAddress("https://127.0.0.2:8910", world.server.certificates))
    monkeypatch.setattr("pslite.launch.daemon_connection.daemon_address_file.search_files", lambda: (file,))
    renew_certificate(url, URLError(ssl.SSLCertVerificationError()))
    assert os.environ["DL2_DAEMON_CERTIFICATE"] != world.server.certificates
    write_address(file, DaemonAddress(url, world.server.certificates))
    assert register(url, body, print).job == registered.job
    monkeypatch.setenv("DL2_DAEMON_CERTIFICATE", certificate_text(before.read_text()))
    said: list[str] = []
    report_failure(DaemonClient(url, registered.job, registered.credential, say=said.append), "no reason")
    assert [said[0][:36], said[1:]] == ["the heartbeat to the daemon failed: ", ["the daemon answers again"]]
    assert "CERTIFICATE_VERIFY_FAILED" in said[0]


def test_plain_http_is_refused_on_both_sides_unless_it_stays_on_this_machine(monkeypatch):
    for url in ("http://192.0.2.1:8910", "http://head.cluster:8910", "http://127.0.0.1.example:8910"):
        with pytest.raises(UsageError, match="https only"):
            register(url, body, print)
    world = ApiWorld()
    try:
        world.add_anchor()
        assert world.register().status_code == 200
        monkeypatch.setattr(bearer_authentication, "is_loopback", lambda _: False)
        refused = world.register()
        assert (refused.status_code, "https only" in error(refused)) == (403, True)
    finally:
        world.close()


def test_a_certificate_that_cannot_be_used_is_told_at_the_start(certificate, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        ApiServer("127.0.0.1", 0, certificate=tmp_path / "none.pem", certificate_key=certificate[1])
    with pytest.raises(ConfigError, match=r"api\.certificate="):
        ApiServer("127.0.0.1", 0, certificate=certificate[1], certificate_key=certificate[0])


def test_a_certificate_that_was_replaced_or_is_gone_is_told_while_the_daemon_runs(tmp_path):
    certificate, key = self_signed(tmp_path)
    api = ApiSettings(host="127.0.0.1", certificate=certificate, certificate_key=key)
    served = certificate_text(certificate.read_text())
    assert not served_certificate_problem(api, served)
    self_signed(tmp_path)
    assert "was replaced, and the daemon serves the one before: restart it" in served_certificate_problem(api, served)
    certificate.unlink()
    assert "No such file" in served_certificate_problem(api, served)
    assert not served_certificate_problem(ApiSettings(), "")


def test_commands_say_that_the_daemon_serves_another_certificate_than_the_settings_name(world, certificate, tmp_path):
    url = "https://{}:{}".format(*world.server.address)
    other = self_signed(tmp_path)
    trusts = [
        daemon_trust(Settings(api=ApiSettings(certificate=each[0], certificate_key=each[1])))
        for each in (certificate, other)
    ]
    good, refused = (ask_health(url, trust, "", 10.0, None) for trust in trusts)
    assert (good.runs, refused.runs, refused.blocked) == (True, False, True)
    assert refused.problems[0].startswith(f"the certificate at {url} is refused (")
    assert "if api.certificate was replaced, restart the daemon" in refused.problems[0]
