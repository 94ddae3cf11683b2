from __future__ import annotations

import pytest

from dl2d.core.errors import ConfigError
from dl2d_slurm.cluster_check.configuration_advice import unsuitable_options_advice
from dl2d_slurm.manager import create
from dl2d_slurm.settings import SlurmSettings


def test_nothing_needs_to_be_set() -> None:
    assert SlurmSettings.parse({}) == SlurmSettings()


def test_all_keys_are_read() -> None:
    given = {
        "cluster": "lab",
        "partition": "gpu,gpu-long",
        "slurm_conf": "/etc/slurm/slurm.conf",
        "munge_socket": "/run/munge/munge.socket.2",
        "backend": "rest",
        "slurmrestd": "https://head:6820",
        "command_timeout_seconds": 5,
        "poll_floor_seconds": 2.5,
        "submit_rate_per_second": 1,
        "time_limit": 60,
        "default_memory_mib": 512,
        "sbatch_options": ["--reservation=ml", "--exclusive"],
    }
    settings = SlurmSettings.parse(given)
    assert settings.time_limit == "60"
    assert settings.sbatch_options == ("--reservation=ml", "--exclusive")
    assert settings.command_timeout_seconds == 5.0
    assert {name for name in given if getattr(settings, name) == getattr(SlurmSettings(), name)} == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partitions", "gpu"),
        ("cluster", "my cluster"),
        ("cluster", ["lab"]),
        ("partition", "-gpu"),
        ("partition", "a b"),
        ("slurm_conf", "slurm.conf"),
        ("munge_socket", 3),
        ("backend", "cli"),
        ("slurmrestd", "localhost:6820"),
        ("slurmrestd", "unix:socket"),
        ("slurmrestd", "https://head:99999"),
        ("slurmrestd", "https://head/slurm"),
        ("slurmrestd", "https://root@head"),
        ("command_timeout_seconds", 0),
        ("command_timeout_seconds", "soon"),
        ("command_timeout_seconds", float("nan")),
        ("poll_floor_seconds", -1),
        ("submit_rate_per_second", True),
        ("time_limit", "2 days"),
        ("time_limit", True),
        ("default_memory_mib", -1),
        ("sbatch_options", "--exclusive"),
        ("sbatch_options", ["exclusive"]),
        ("sbatch_options", ["--uid=0"]),
        ("sbatch_options", ["--wrap=id"]),
        ("sbatch_options", ["--job-n=x"]),
        ("sbatch_options", ["--quiet"]),
    ],
)
def test_what_is_bad_is_refused_with_its_full_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^resource_manager\.slurm\.{key}: "):
        create({key: value}, clock=lambda: 0.0)


@pytest.mark.parametrize("address", ["http://localhost:6820", "HTTP://head"])
def test_slurmrestd_is_not_called_without_tls(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"slurmrestd: http:// would show the daemon's token .*; use https:// or unix:/"
    ):
        SlurmSettings.parse({"slurmrestd": address})


@pytest.mark.parametrize(
    ("option", "says", "wrong"),
    [
        ("--hold", "no task starts before somebody releases it", True),
        ("--ho", "no task starts before somebody releases it", True),
        ("--begin=tomorrow", "so none may ever start", True),
        ("--dependency=afterok:17", "so none may ever start", True),
        ("--deadline=now+1minute", "Slurm ends or removes tasks at that time", False),
        ("--exclusive", "each task gets a whole node, but dl2d counts only what it asked for", False),
        ("--exclusive=user", "each task gets a whole node", False),
        ("--container=/x", "dl2-run starts inside the container", False),
        ("--priority=9", "tasks come before all jobs of others", False),
        ("--reservation=ml", "", False),
        ("--exclude=n1", "", False),
        ("--constraint=a100", "", False),
        ("--hint=nomultithread", "", False),
    ],
)
def test_options_that_do_not_suit_tasks_are_named(option: str, says: str, wrong: bool) -> None:
    found = list(unsuitable_options_advice(SlurmSettings.parse({"sbatch_options": [option]})))
    assert [(each.item, says in each.text, each.wrong) for each in found] == (
        [("resource_manager.slurm.sbatch_options", True, wrong)] if says else []
    )
    assert all(option in each.text for each in found)
