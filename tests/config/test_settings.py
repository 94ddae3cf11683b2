"""Bad keys and values are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dl2d.config.settings import Settings, load_settings
from dl2d.core.errors import ConfigError
from dl2d.core.resources import Resources


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "dl2d.yaml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("polcy: {name: drf}", "polcy: unknown key"),
        ("_env_file: /etc/environment", "_env_file: unknown key"),
        ("_cli_parse_args: [--help]", "_cli_parse_args: unknown key"),
        ("log: {level: 2024-99-99}", "is not YAML: month must be in 1..12"),
        ("log: {level: !!bool perhaps}", "is not YAML"),
        ("log: {level: !!timestamp soon}", "is not YAML"),
        ("[" * 5000, "is not YAML: maximum recursion depth"),
        ("policy: {nme: drf}", "policy.nme: unknown key"),
        ("policy: {timeout_seconds: 0}", "policy.timeout_seconds: should be greater than 0, got 0"),
        ("policy: {timeout_seconds: soon}", "policy.timeout_seconds"),
        ("schedule: {poll_seconds: -1}", "schedule.poll_seconds"),
        ("schedule: {slot_seconds: 1e9}", "schedule.slot_seconds"),
        ("schedule: {seed: 1.5}", "schedule.seed"),
        ("api: {port: 70000}", "api.port"),
        ("api: {advertise: head}", "api.advertise: must be a URL such as http://head:8910, or empty, got 'head'"),
        ("api: {heartbeat_seconds: 0}", "api.heartbeat_seconds"),
        ("jobs: {max_workers: 0}", "jobs.max_workers"),
        ("jobs: {models: resnet-50}", "jobs.models"),
        ("jobs: {drain_seconds: 0}", "jobs.drain_seconds"),
        ("guard: {per_user: {gpu: many}}", "guard.per_user"),
        ("guard: {per_user: 7}", "guard.per_user"),
        ("guard: {per_account: 'cpu:4,gpu:0'}", "guard.per_account: gpu: must be more than 0"),
        ("guard: {per_user: {cpu: 4, gpu: 0}}", "guard.per_user: gpu: must be more than 0; a resource that is not"),
        ("guard: {churn: -1}", "guard.churn"),
        ("guard: {cooldown_up_seconds: -1}", "guard.cooldown_up_seconds"),
        ("state_dir: here", "state_dir: must be an absolute path such as /var/lib/dl2d, got 'here'"),
        ("state_dir: ~/dl2d", "state_dir: must be an absolute path such as /var/lib/dl2d, got '~/dl2d'"),
        ("store: {progress_seconds: -1}", "store.progress_seconds"),
        ("log: {level: loud}", "log.level"),
        ("log: {format: xml}", "log.format"),
        ("resource_manager: {nodes: 4}", "nodes: unknown key (the settings of another manager would be a section)"),
        ("resource_manager: {local: 4}", "resource_manager.local"),
        ("placement: 7", "placement"),
        ("- a\n- b", "must hold keys and values, not list"),
        ("a: [", "is not YAML"),
    ],
)
def test_bad_settings_are_named(file: Path, text: str, says: str):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_all_problems_are_named_at_once(file: Path):
    file.write_text("policy: {nme: drf}\napi: {port: x}\n")
    with pytest.raises(ConfigError, match=r"policy\.nme: unknown key; api\.port|api\.port.*; policy\.nme: unknown key"):
        load_settings(file)


def test_a_missing_file_says_where_to_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist; `dl2d config` prints a documented sample"):
        load_settings(tmp_path / "none.yaml")


def test_what_is_not_text_is_refused(file: Path):
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(file)


def test_an_empty_file_has_the_defaults(file: Path):
    file.write_text("")
    assert load_settings(file) == Settings()


def test_the_environment_goes_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch):
    file.write_text("policy: {name: drf, fallback: drf}")
    monkeypatch.setenv("DL2D_POLICY__NAME", "fifo")
    settings = load_settings(file)
    assert (settings.policy.name, settings.policy.fallback) == ("fifo", "drf")


def test_a_bad_variable_is_named(file: Path, monkeypatch: pytest.MonkeyPatch):
    file.write_text("")
    monkeypatch.setenv("DL2D_API__PORT", "x")
    with pytest.raises(ConfigError, match=r"api\.port \(from DL2D_API__PORT\): "):
        load_settings(file)


def test_paths_and_limits(file: Path):
    file.write_text("state_dir: /srv/dl2d\nguard: {per_user: 'gpu:4,memory:2G'}\njobs: {max_workers: 3, models: [a]}\n")
    settings = load_settings(file)
    assert settings.store_url == "sqlite:////srv/dl2d/dl2d.sqlite"
    assert settings.secret_path == Path("/srv/dl2d/secret")
    assert settings.guard.per_user == Resources.of(gpu=4, memory=2048)
    assert (settings.jobs.rules.max_workers, settings.jobs.rules.models) == (3, frozenset({"a"}))


def test_settings_of_a_manager_that_is_a_plugin(file: Path):
    file.write_text("resource_manager: {name: yarn, yarn: {url: 'http://rm'}}\n")
    assert load_settings(file).resource_manager.chosen == {"url": "http://rm"}
