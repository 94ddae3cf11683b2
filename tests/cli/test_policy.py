"""Versions of a policy that learns, from the command line; and what is told of one that cannot be used."""

from __future__ import annotations

import re
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import Dl2d, Recorded, new_store, store_url, write_config
from free_ports import free_port
from learning.site_records.test_recorded_days import a_history, a_job
from recorded_site import MONDAY

from dl2d.cli import policy as policy_commands
from dl2d.cli.policy_trials import check_trained_policy, trial_on_recorded_days
from dl2d.config.settings import load_settings
from dl2d.core.jobs import Allocation
from dl2d.core.policy_registry import SITE_SCHEDULER, Trial, Version, VersionState
from dl2d.core.progress_callback import silent
from dl2d.learning.site_records.split_of_recorded_days import split_history
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.policies.drf import Drf
from dl2d.store.sql_store import SqlStore


@pytest.fixture
def config(tmp_path: Path) -> Path:
    config = write_config(tmp_path, policy={"name": "dl2"}, api={"port": free_port()})
    new_store(tmp_path)
    return config


FORCE = ("--force", "--reason", "to try it")
#: What is recorded then, of a version, at a site whose store has no days yet.
FORCED = (
    "to try it (forced: dl2 version {} cannot be compared with the live policy version: jobs with measured speeds were "
    "submitted on 0 of the recorded days; at least 2 are needed (only whole days in UTC count, recorded for more "
    "than half of them; "
    "jobs of fixed size report no speeds and do not "
    "count))"
)


def checkpoint(folder: Path, number: int) -> Path:
    base = with_checkpoint().checkpoint
    scorer = np.asarray(base.weights["scorer"]) + number
    made = Checkpoint(policy="dl2", weights={**base.weights, "scorer": scorer}, settings=base.settings, training={})
    write_checkpoint(made, folder / f"c{number}")
    return folder / f"c{number}"


def test_only_a_comparison_that_was_made_is_said_to_be_one(config: Path) -> None:
    """Also what is left out of it is told."""
    days, jobs = 3, [a_job(number, number * 9000.0) for number in range(1, 28)]
    sizes = {job.key: ((MONDAY + 1.0, Allocation(8 if job.key.id == "12" else 2, 1)),) for job in jobs}
    history = replace(a_history(*jobs), sizes=sizes)
    split = split_history(history, 1200.0, seed=0, min_days=days, draws=1, tests=2, for_training=False)
    settings = load_settings(config)

    def reason(min_jobs: int, deleted: int = 0) -> str:
        learning = settings.learning.model_copy(update={"gate_min_jobs": min_jobs})
        trial = trial_on_recorded_days.on_trial(
            settings.model_copy(update={"learning": learning}), "drf", replace(split, deleted=deleted),
            trial_on_recorded_days.TrialPolicy("other", Drf()),
            trial_on_recorded_days.TrialPolicy(SITE_SCHEDULER, None), tell=silent,
        )  # fmt: skip
        return trial.reason

    too_large = "1 job larger than the nodes at most times of the day, or than 1000 tasks"
    assert reason(30).endswith(f" are needed ({too_large} and jobs that did not end do not count)")
    deleted = "2 days of which decisions or jobs are no longer stored (store.keep_decisions_days, store.keep_jobs_days)"
    assert reason(30, deleted=2).endswith(
        f" are needed ({deleted}; {too_large} and jobs that did not end do not count)"
    )
    assert reason(10, deleted=2).endswith(f", without {too_large}, without {deleted}")
    assert reason(10).endswith(
        " with 26 jobs and 16 draws of speeds, compared with the site's scheduler (its recorded sizes), "
        f"without {too_large}"
    )


def test_promote_list_and_roll_back(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    one, two = (
        dl2d("policy", "promote", checkpoint(tmp_path, number), *FORCE, "--json", "-c", config).json
        for number in (1, 2)
    )
    assert (one["state"], two["state"]) == ("live", "live")
    shutil.rmtree(tmp_path / "c1")  # a version is a copy
    ran = dl2d("policy", "rollback", "--reason", "slower", "-c", config)
    assert ran.out == f"dl2 version {one['digest'][:12]} decides from the next interval on ({one['origin']})\n"
    shown = dl2d("policy", "list", "--json", "-c", config).json
    assert {each["digest"]: each["state"] for each in shown["versions"]} == {
        one["digest"]: "live", two["digest"]: "retired"
    }  # fmt: skip
    assert [(each["reason"], each["rollback"]) for each in shown["changes"] if each["after"] == "live"] == [
        ("slower", True), (FORCED.format(two["digest"][:12]), False), (FORCED.format(one["digest"][:12]), False)
    ]  # fmt: skip
    (decides,) = [each for each in shown["policy"] if each["charge"] == "decides"]
    assert decides["version"] == f"{one['digest'][:12]} slot_seconds=300.0"
    ran = dl2d("policy", "rollback", "-c", config)
    assert ran.status == 1
    assert "is the first: there is none before it; to end its decisions, set another policy.name" in ran.err
    # It was live once, and was taken back.
    again = ("policy", "promote", two["digest"][:6].upper())
    ran = dl2d(*again, "-c", config)
    assert ran.status == 1
    assert "cannot be compared with the live policy version" in ran.err
    assert dl2d(*again, *FORCE, "-c", config).status == 0
    assert dl2d(*again, "-c", config).status == 0  # it is live already


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("observe", "is live, but in mode observe no policy decides"),
        ("shadow", "decides from the next interval on in mode shadow, which changes nothing on the cluster"),
        ("live", "decides from the next interval on"),
    ],
)
def test_what_a_promoted_version_does_depends_on_the_mode(
    dl2d: Dl2d, config: Path, tmp_path: Path, mode: str, what: str
) -> None:
    write_config(tmp_path, mode=mode, policy={"name": "dl2"})
    made = checkpoint(tmp_path, 1)
    ran = dl2d("policy", "promote", made, *FORCE, "-c", config)
    digest = read_checkpoint(made, policy="dl2").digest
    assert ran.out == f"dl2 version {digest[:12]} {what} (checkpoint {made})\n"


def test_a_passed_trial_counts_while_that_decides_and_until_the_version_is_taken_back(
    dl2d: Dl2d, config: Path, tmp_path: Path
) -> None:
    def promoted(number: int) -> str:
        ran = dl2d("policy", "promote", checkpoint(tmp_path, number), *FORCE, "--json", "-c", config)
        return str(ran.json["digest"])

    two, one = promoted(2), promoted(1)
    settings = load_settings(config)
    with closing(SqlStore(store_url(tmp_path))) as store:
        registry = store.registry
        registry.add_trial(
            Trial(at=time.time(), policy="dl2", candidate=two, current=one, days=(), cases=(), change=None, low=None,
                  high=None, passed=True, reason="a test")
        )  # fmt: skip
        (version,) = (each for each in registry.versions("dl2") if each.digest == two)

        def counts() -> bool:
            present = trial_on_recorded_days.deciding(settings, registry)
            return trial_on_recorded_days.passed_trial(settings, registry, version, present) is not None

        assert counts()
        promoted(3)
        assert not counts()  # it was never compared with this one
        assert dl2d("policy", "rollback", "-c", config).status == 0
        assert counts()
        assert promoted(2) == two
        assert dl2d("policy", "rollback", "-c", config).status == 0
        assert trial_on_recorded_days.deciding(settings, registry).digest == one
        assert not counts()


def a_network(folder: Path, favourite: int, *, bias: float = 9.0, window: int = 2) -> Path:
    """A checkpoint of the paper's design that always takes one action if it may."""
    biases = np.zeros(3 * window + 1, dtype=np.float32)
    biases[favourite] = bias
    width = window * 6 + 2
    weights = {
        "policy.0.weight": np.zeros((1, width), dtype=np.float32), "policy.0.bias": np.zeros(1, dtype=np.float32),
        "policy.1.weight": np.zeros((3 * window + 1, 1), dtype=np.float32), "policy.1.bias": biases,
    }  # fmt: skip
    settings = {
        "network": "dense", "window": window, "models": ["other"], "resources": ["cpu", "gpu"],
        "first_bundles": False, "sampled": False, "slot_seconds": 300.0, "extras": False,
    }  # fmt: skip
    made = Checkpoint(policy="dl2-original", weights=weights, settings=settings, training={})
    write_checkpoint(made, folder / f"network{favourite}{bias}")
    return folder / f"network{favourite}{bias}"


def test_one_that_leaves_jobs_waiting_on_an_idle_cluster_is_refused_everywhere(dl2d: Dl2d, tmp_path: Path) -> None:
    config = write_config(tmp_path, policy={"name": "dl2-original"}, api={"port": free_port()})
    new_store(tmp_path)
    idle = a_network(tmp_path, favourite=6)  # void before anything else
    ran = dl2d("policy", "promote", idle, "-c", config)
    assert ran.status == 1
    assert (
        "leaves 19 of 19 jobs waiting on an idle cluster (one asks for cpu=1 gpu=1 a worker and cpu=1 a PS" in ran.err
    )
    assert "nothing was changed; to promote it anyway, add --force --reason TEXT" in ran.err
    shown = dl2d("policy", "list", "--json", "-c", config).json
    assert [each["state"] for each in shown["versions"]] == ["candidate"]
    assert dl2d("policy", "promote", idle, "--force", "-c", config).status == 2
    ran = dl2d("policy", "promote", idle, "--force", "--reason", "a test", "-c", config)
    assert ran.status == 0
    (change,) = dl2d("policy", "list", "--json", "-c", config).json["changes"]
    assert change["reason"].startswith("a test (forced: dl2-original version ")
    good, text = findings(dl2d, config)["live version"]
    assert not good
    assert "leaves 19 of 19 jobs waiting on an idle cluster" in text
    config = write_config(tmp_path, policy={"name": "dl2-original", "checkpoint": str(a_network(tmp_path, 5))})
    assert findings(dl2d, config)["policy.checkpoint"][0]


def test_promote_replays_what_does_not_decide_already_and_says_if_that_was_cut_short(
    dl2d: Dl2d, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_trained_policy, "MAX_REPLAY_SECONDS", 0.0)
    ran = dl2d("policy", "promote", checkpoint(tmp_path, 0), "-c", recorded.config)
    assert "decides already, so there is nothing to compare it with" in ran.err
    assert "replays" not in ran.err
    ran = dl2d("policy", "promote", checkpoint(tmp_path, 1), "-c", recorded.config)
    cut = r"^\d+ of 30 jobs ended in 0 s of replays; not replayed to the end: a small generated load$"
    assert re.search(cut, ran.err, re.MULTILINE)


@pytest.mark.parametrize("force", [False, True])
def test_a_version_that_was_compared_with_one_that_is_not_live_any_more_goes_live_only_by_force(
    dl2d: Dl2d, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    first, meanwhile = (
        dl2d("policy", "promote", checkpoint(tmp_path, number), *FORCE, "--json", "-c", config).json["digest"]
        for number in (1, 2)
    )
    dl2d("policy", "rollback", "-c", config)

    def comparison(_: object, store: SqlStore, version: Version) -> str:
        store.registry.change("dl2", meanwhile, VersionState.LIVE, at=1.0, by="gate", reason="a learner's")
        return "better than the first"

    monkeypatch.setattr(policy_commands, "_pass_gate", comparison)
    ran = dl2d("policy", "promote", checkpoint(tmp_path, 3), *(FORCE if force else ()), "-c", config)
    with closing(SqlStore(store_url(tmp_path))) as store:
        live = store.registry.live("dl2")
    assert live is not None
    assert (ran.status, live.digest not in (first, meanwhile)) == ((0, True) if force else (1, False)), ran.err
    told = "another version of dl2 went live meanwhile; nothing was changed; promote again, to compare with it"
    assert (told in ran.err) != force


def test_a_candidate_of_a_canary_without_a_result_is_refused_in_these_words(dl2d: Dl2d, tmp_path: Path) -> None:
    """Unless it passed the gate as well; one whose canary was passed is live."""
    network = a_network(tmp_path, 5)
    policy = {"name": "dl2-original", "fallback": "drf", "checkpoint": str(network)}
    config = write_config(tmp_path, policy=policy, mode="canary", api={"port": free_port()})
    new_store(tmp_path)
    ran = dl2d("policy", "promote", network, "-c", config)
    assert ran.status == 1
    assert "is being tried in mode canary, which has no result yet: it goes live by itself as soon as it is" in ran.err
    assert "decides already" not in ran.err
    with closing(SqlStore(store_url(tmp_path))) as store:
        (version,) = store.registry.versions("dl2-original")
        assert version.state is VersionState.CANDIDATE
        why = "canary 1: surely slower than drf"
        store.registry.change(
            "dl2-original", version.digest, VersionState.REJECTED, at=time.time(), by="daemon", reason=why
        )
    ran = dl2d("policy", "promote", network, "-c", config)
    assert (ran.status, f"was rejected ({why}); nothing was changed" in ran.err) == (1, True), ran.err
    with closing(SqlStore(store_url(tmp_path))) as store:
        store.registry.add_trial(
            Trial(at=time.time(), policy="dl2-original", candidate=version.digest, current="drf", days=(), cases=(),
                  change=None, low=None, high=None, passed=True, reason="a test")
        )  # fmt: skip
    ran = dl2d("policy", "promote", network, "-c", config)
    assert (ran.status, "passed the gate: a test" in ran.out) == (0, True), ran.err
    assert dl2d("policy", "promote", network, "-c", config).status == 0  # it is live


def test_one_that_overflows_cannot_be_promoted_by_force(dl2d: Dl2d, tmp_path: Path) -> None:
    config = write_config(tmp_path, policy={"name": "dl2-original"}, api={"port": free_port()})
    new_store(tmp_path)
    broken = a_network(tmp_path, favourite=0, bias=float("nan"))
    for more in ((), FORCE):
        ran = dl2d("policy", "promote", broken, *more, "-c", config)
        assert ran.status == 1
        assert len(ran.err.strip().splitlines()) == 1, ran.err
    assert dl2d("policy", "list", "--json", "-c", config).json["changes"] == []


def test_what_cannot_be_promoted(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for what, words in (
        ("abcdef", "'abcdef' is neither a version of dl2 nor a folder"),
        (str(tmp_path / "empty"), "is not a checkpoint"),
        ("", "is not a checkpoint"),
    ):
        ran = dl2d("policy", "promote", what, "-c", config)
        assert ran.status == 1
        assert words in ran.err
    assert dl2d("policy", "list", "--json", "-c", config).json["versions"] == []
    config = write_config(tmp_path, policy={"name": "drf"})
    ran = dl2d("policy", "rollback", "-c", config)
    assert ran.status == 2
    assert "policy.name: policy 'drf' is not a learned one and has no versions" in ran.err


def findings(dl2d: Dl2d, config: Path) -> dict[str, tuple[bool, str]]:
    return {
        each["item"]: (each["good"], each["text"]) for each in dl2d("check", "--json", "-c", config).json["findings"]
    }


def test_check_tells_of_a_checkpoint_that_cannot_be_read(dl2d: Dl2d, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    here = {"api": {"port": free_port()}}
    config = write_config(
        tmp_path, policy={"name": "dl2", "checkpoint": str(folder), "settings": {"optimism": 1}}, **here
    )
    good, text = findings(dl2d, config)["policy.checkpoint"]
    assert good
    assert text.endswith(" optimism=1.0 slot_seconds=300.0")
    (folder / "weights.safetensors").write_bytes(b"x")
    good, text = findings(dl2d, config)["policy.checkpoint"]
    assert (good, "is damaged" in text) == (False, True)
    config = write_config(tmp_path, policy={"name": "dl2", "settings": {"speed": 1}}, **here)
    good, text = findings(dl2d, config)["policy.settings"]
    assert not good
    assert (
        text == "policy.settings.speed: policy 'dl2' has no such setting; it has optimism, resize_seconds, slot_seconds"
    )
    config = write_config(tmp_path, policy={"name": "drf"}, learning={"enabled": True}, **here)
    assert findings(dl2d, config)["learning.enabled"] == (
        False, "policy 'drf' does not learn from a site; set policy.name: dl2 or dl2-original"
    )  # fmt: skip


def test_check_tells_of_a_live_version_that_is_gone(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    promoted = dl2d("policy", "promote", checkpoint(tmp_path, 1), *FORCE, "--json", "-c", config).json
    good, text = findings(dl2d, config)["live version"]
    assert good
    assert text.startswith(f"dl2 version {promoted['digest'][:12]} slot_seconds=300.0, checkpoint ")
    shutil.rmtree(promoted["folder"])
    good, text = findings(dl2d, config)["live version"]
    assert (good, "is not a checkpoint" in text) == (False, True)
    assert text.startswith(f"dl2 version {promoted['digest'][:12]} cannot be used, so the fallback decides: ")


def test_intervals_of_another_length_than_in_training_are_a_warning(dl2d: Dl2d, tmp_path: Path) -> None:
    network = a_network(tmp_path, 5)  # trained with 300 s
    words = "was trained with intervals of 300 s and may decide otherwise with schedule.slot_seconds="
    new_store(tmp_path)
    for seconds, is_told in ((2, True), (150, False), (600, False), (601, True)):
        config = write_config(
            tmp_path, policy={"name": "dl2-original", "checkpoint": str(network)}, api={"port": free_port()},
            schedule={"slot_seconds": seconds, "poll_seconds": 1},
        )  # fmt: skip
        found = findings(dl2d, config)
        assert ("schedule.slot_seconds" in found) == is_told
        if is_told:
            good, text = found["schedule.slot_seconds"]
            assert (good, f"{words}{seconds};" in text) == (True, True)
        ran = dl2d("policy", "promote", network, *FORCE, "-c", config)
        assert (ran.status, words in ran.err) == (0, is_told), ran.err


def test_a_twin_needs_a_store_with_days(dl2d: Dl2d, config: Path, tmp_path: Path) -> None:
    ran = dl2d("train", "--twin", "-c", config, "-o", tmp_path / "out")
    assert ran.status == 2
    assert "the twin: jobs with measured speeds were submitted on 0 of the recorded days" in ran.err
    ran = dl2d("train", "--twin", "--store", f"sqlite:///{tmp_path}/none.sqlite", "-o", tmp_path / "out")
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert dl2d("train", "--twin", "-w", "generator:dl2", "-c", config).status == 2
    assert not (tmp_path / "out").exists()
