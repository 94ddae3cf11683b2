"""Which version of a policy that learns decides: at the start, when another goes live, when one cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import LocalCluster
from policies.dl2_paper.test_policy import a_checkpoint as a_checkpoint_of_the_paper
from store.samples import a_slot
from structlog.testing import capture_logs

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import CheckpointError, ConfigError
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import VersionState
from dl2d.daemon.policy_versions.active_version import (
    ActiveVersion,
    current_checkpoint,
    keep_version,
    live_checkpoint,
    version_in,
)
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from dl2d.policies.dl2.policy import with_checkpoint
from dl2d.store.sql_store import SqlStore

DAY = 86_400.0


def another(number: int) -> Checkpoint:
    """A checkpoint like the shipped one, with other weights."""
    base = with_checkpoint().checkpoint
    scorer = np.asarray(base.weights["scorer"]) + number
    return Checkpoint(
        policy="dl2", weights={**base.weights, "scorer": scorer}, settings=base.settings, training={"number": number}
    )


@pytest.fixture
def store() -> Iterator[SqlStore]:
    with closing(SqlStore("sqlite://")) as store:
        yield store


class Site:
    """A configuration and a store."""

    def __init__(self, folder: Path, store: SqlStore) -> None:
        self.folder, self.store = folder, store

    def settings(self, mode: Mode = Mode.LIVE, **policy: Any) -> Settings:
        return Settings.model_validate(
            {"state_dir": self.folder / "state", "mode": mode, "policy": {"name": "dl2", **policy}}
        )

    def active(
        self, mode: Mode = Mode.LIVE, *, starting: bool = False, running: Policy | None = None, **policy: Any
    ) -> ActiveVersion:
        settings = self.settings(mode, **policy)
        return ActiveVersion(settings, self.store, lambda: 7.0, starting=starting, running=running)

    def promote(self, checkpoint: Checkpoint) -> Path:
        registry = self.store.registry
        kept = keep_version(checkpoint, self.settings().versions_path, registry, at=1.0, origin="a test")
        registry.change("dl2", kept.digest, VersionState.LIVE, at=2.0, by="ann", reason="a test")
        return Path(kept.folder)

    def state(self, checkpoint: Checkpoint) -> VersionState:
        return next(each.state for each in self.store.registry.versions("dl2") if each.digest == checkpoint.digest)

    def live(self) -> str | None:
        found = self.store.registry.live("dl2")
        return None if found is None else found.digest


@pytest.fixture
def site(tmp_path: Path, store: SqlStore) -> Site:
    return Site(tmp_path, store)


def test_what_comes_with_dl2d_is_the_first_live_version(site: Site) -> None:
    active = site.active()
    assert active.policy.version == f"{with_checkpoint().checkpoint.digest[:12]} slot_seconds=300.0"
    assert site.live() == with_checkpoint().checkpoint.digest
    (change,) = site.store.registry.changes()
    assert (change.by, change.reason) == ("daemon", "begins: it comes with dl2d")
    again = site.active()
    assert again.policy.version == active.policy.version
    assert len(site.store.registry.changes()) == 1
    assert again.refreshed() is None


@pytest.mark.parametrize(
    ("training", "jobs", "days"),
    [
        ({"days": ["1970-01-02", "1970-01-04"], "supervised": {"jobs": 46}}, 46, (1.0, 4.0)),
        ({"days": ["1970-01-02", "1970-01-04"], "data_from": 3 * DAY, "data_to": 4 * DAY, "jobs": 7}, 7, (3.0, 4.0)),
        ({"jobs": 5}, 0, None),
        ({"days": "many", "jobs": 5}, 0, None),
    ],
    ids=["supervised", "twin", "of no site", "unreadable"],
)
def test_a_kept_version_says_which_recorded_days_it_learned_from(
    site: Site, training: dict[str, Any], jobs: int, days: tuple[float, float] | None
) -> None:
    made = replace(another(1), training=training)
    keep_version(made, site.folder / "versions", site.store.registry, at=1.0, origin="a test")
    (kept,) = site.store.registry.versions()
    assert kept.jobs == jobs
    assert (kept.data_from, kept.data_to) == ((None, None) if days is None else (days[0] * DAY, days[1] * DAY))


def test_settings_are_part_of_the_version(site: Site) -> None:
    version = site.active(settings={"optimism": 0.1, "resize_seconds": 3}).policy.version
    assert version.split()[1:] == ["optimism=0.1", "resize_seconds=3.0", "slot_seconds=300.0"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            {"settings": {"optimsm": 1}},
            r"policy.settings.optimsm: policy 'dl2' has no such setting; it has optimism",
        ),
        ({"settings": {"optimism": True}}, "policy.settings.optimism: expected a number, got True"),
        ({"settings": {"resize_seconds": -1}}, "resize_seconds at least 0"),
        ({"name": "drf", "settings": {"optimism": 1}}, "policy.settings.optimism: policy 'drf' has no such setting"),
        ({"name": "drf", "checkpoint": "x"}, "policy.checkpoint: policy 'drf' has no checkpoints"),
        ({"checkpoint": "/no/such/folder"}, "policy.checkpoint: /no/such/folder: is not a checkpoint"),
    ],
)
def test_a_bad_configuration_is_refused_by_its_key(site: Site, policy: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words) as refused:
        site.active(**policy)
    assert isinstance(refused.value, ConfigError) or "resize_seconds" in words


def test_learning_needs_a_policy_that_learns(site: Site) -> None:
    settings = Settings.model_validate({"policy": {"name": "drf"}, "learning": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"learning.enabled: policy 'drf' does not learn from a site"):
        ActiveVersion(settings, site.store, lambda: 7.0)


def test_a_version_that_goes_live_decides_until_it_is_taken_back(site: Site) -> None:
    active = site.active()
    first = active.policy.version
    site.promote(another(1))
    taken = active.refreshed()
    assert taken is active.policy
    assert taken is not None
    assert taken.version.startswith(another(1).digest[:12])
    assert site.active().policy.version == taken.version  # a daemon that starts now has it, too
    site.store.registry.roll_back("dl2", at=3.0, by="ann", reason="slower")
    back = active.refreshed()
    assert back is not None
    assert back.version == first


def test_a_version_that_fails_is_withdrawn_and_the_one_before_it_decides(site: Site) -> None:
    active = site.active()
    first = active.policy.version
    site.promote(another(1))
    active.refreshed()
    assert active.withdraw("5 consecutive decisions failed, the last one: overflow")
    back = active.refreshed()
    assert back is not None
    assert (back.version, site.live()) == (first, with_checkpoint().checkpoint.digest)
    (change, *_) = site.store.registry.changes("dl2")
    assert (change.by, change.rollback) == ("daemon", True)
    assert change.reason == "5 consecutive decisions failed, the last one: overflow"


def test_a_version_that_fails_and_is_the_first_is_set_aside_until_another_is_live(site: Site) -> None:
    active = site.active()
    with capture_logs() as logs:
        assert [active.withdraw("it failed") for _ in range(2)] == [True, False]
    assert [entry["event"][:20] for entry in logs] == ["policy version fails"]
    shipped = with_checkpoint().checkpoint.digest
    assert active.set_aside is not None
    assert (active.set_aside.policy, active.set_aside.version) == ("dl2", shipped[:12])
    assert "no other version can take its place: it failed; promote another" in active.set_aside.reason
    remarks = [change.reason for change in site.store.registry.changes("dl2") if "it failed" in change.reason]
    assert len(remarks) == 1
    assert "; the fallback decides until " in remarks[0]
    assert site.live() == shipped
    assert (active.refreshed(), active.set_aside is None) == (None, False)
    assert site.active().set_aside is None  # after a reload it is asked again
    site.promote(another(1))
    assert active.refreshed() is not None
    assert active.set_aside is None


def test_a_version_that_went_live_meanwhile_is_not_withdrawn(site: Site) -> None:
    active = site.active()
    site.promote(another(1))
    assert not active.withdraw("it failed")
    assert site.live() == another(1).digest


def test_a_version_that_fails_makes_way_for_the_nearest_that_can_be_read(site: Site) -> None:
    active = site.active()
    first = active.policy.version
    shutil.rmtree(site.promote(another(1)))
    site.promote(another(2))
    active.refreshed()
    assert active.withdraw("it failed")
    back = active.refreshed()
    assert back is not None
    assert (back.version, site.live()) == (first, with_checkpoint().checkpoint.digest)
    remarks = [change.reason for change in site.store.registry.changes() if change.digest == another(1).digest]
    assert remarks[0].startswith("passed over in a rollback: ")


def test_a_version_that_fails_stays_where_no_earlier_one_can_be_read(site: Site) -> None:
    folder = site.promote(another(1))
    active = site.active()
    site.promote(another(2))
    active.refreshed()
    shutil.rmtree(folder)
    with capture_logs() as logs:
        assert active.withdraw("it failed")
    assert active.set_aside is not None
    assert logs[-1]["error"] == "no version of dl2 before the live one can be read (1 were tried)"
    assert site.live() == another(2).digest


def test_a_checkpoint_that_the_configuration_names_anew_goes_live(site: Site, tmp_path: Path) -> None:
    site.active()
    write_checkpoint(another(2), tmp_path / "mine")
    active = site.active(checkpoint=str(tmp_path / "mine"))
    assert active.policy.version.startswith(another(2).digest[:12])
    assert site.live() == another(2).digest
    assert "without the gate, since nothing was recorded" in site.store.registry.changes()[0].reason
    # Later ones go before it: it is where a site begins.
    site.promote(another(3))
    assert site.active(checkpoint=str(tmp_path / "mine")).policy.version.startswith(another(3).digest[:12])


def test_a_checkpoint_of_the_configuration_acts_only_after_it_was_promoted(site: Site, tmp_path: Path) -> None:
    """Where there are recorded days that it could be compared on; in shadow it decides, and is a candidate."""
    shipped = with_checkpoint().checkpoint.digest
    site.active()
    site.store.record_slot(a_slot(1, ()))
    mine = str(tmp_path / "mine")
    write_checkpoint(another(2), tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"has not passed the gate; run `dl2d policy promote .*/mine`"):
        site.active(checkpoint=mine)
    for _ in range(2):  # also after a restart, when it is known
        active = site.active(Mode.SHADOW, checkpoint=mine)
        assert active.policy.version.startswith(another(2).digest[:12])
        assert active.refreshed() is None
        assert (site.live(), site.state(another(2))) == (shipped, VersionState.CANDIDATE)
        found = current_checkpoint(site.settings(Mode.SHADOW, checkpoint=mine), site.store.registry, "dl2")
        assert found is not None
        assert found.digest == another(2).digest
        with pytest.raises(ConfigError, match="has not passed the gate"):
            site.active(checkpoint=mine)
    # A machine that starts again goes on with what decided.
    with capture_logs() as logs:
        assert site.active(starting=True, checkpoint=mine).policy.version.startswith(shipped[:12])
    assert "has not passed the gate" in logs[-1]["problem"]
    site.promote(another(3))
    found = active.refreshed()  # what went live since is newer
    assert found is not None
    assert found.version.startswith(another(3).digest[:12])
    site.promote(another(2))
    assert site.active(checkpoint=mine).policy.version.startswith(another(2).digest[:12])


def damage(folder: Path, how: str) -> None:
    if how == "gone":
        shutil.rmtree(folder)
    elif how == "cut":
        weights = folder / "weights.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        write_checkpoint(another(9), folder)


@pytest.mark.parametrize("how", ["cut", "no record", "empty record", "no weights", "another", "empty"])
def test_a_damaged_version_is_repaired_by_its_checkpoint_and_a_good_one_is_not_written_again(
    tmp_path: Path, how: str
) -> None:
    place = Path(version_in(tmp_path / "policies", another(1), at=0.0, origin="a test").folder)
    written = place.stat().st_ino
    version_in(tmp_path / "policies", another(1), at=1.0, origin="a test")
    assert place.stat().st_ino == written
    if how == "no record":
        (place / "checkpoint.json").unlink()
    elif how == "empty record":
        (place / "checkpoint.json").write_bytes(b"")
    elif how == "no weights":
        (place / "weights.safetensors").unlink()
    elif how == "empty":
        shutil.rmtree(place)
        place.mkdir()
    else:
        damage(place, how)
    version_in(tmp_path / "policies", another(1), at=2.0, origin="a test")
    assert read_checkpoint(place, policy="dl2").digest == another(1).digest
    assert [each.name for each in place.parent.iterdir()] == [place.name]


@pytest.mark.parametrize("how", ["gone", "cut", "another"])
def test_a_version_that_cannot_be_read_is_told_once_and_what_decided_goes_on(site: Site, how: str) -> None:
    active = site.active()
    before = active.policy
    damage(site.promote(another(1)), how)
    with capture_logs() as logs:
        assert active.refreshed() is None
        assert active.refreshed() is None
    assert active.policy is before
    assert [entry["event"] for entry in logs] == ["policy version cannot be used"]
    remark = site.store.registry.changes()[0]
    assert (remark.by, remark.digest, remark.after) == ("daemon", another(1).digest, "live")
    assert "cannot be used: " in remark.reason
    with capture_logs() as logs:  # in a daemon that starts now, the fallback decides
        started = site.active(starting=True)
    assert (started.policy.name, started.set_aside is None) == (site.settings().policy.fallback, False)
    assert [entry["event"] for entry in logs] == ["policy version cannot be used"]
    site.promote(another(2))
    taken = active.refreshed()
    assert taken is not None
    assert taken.version.startswith(another(2).digest[:12])
    assert started.refreshed() is started.policy
    assert (started.policy.version, started.set_aside) == (taken.version, None)


@pytest.mark.parametrize("reloading", [False, True])
def test_a_live_version_that_can_be_read_again_decides_from_the_next_slot_on(site: Site, reloading: bool) -> None:
    """Whether the fallback decided meanwhile, at a start or at a reload, or the version that was live before."""
    before = site.active()
    folder = site.promote(another(1))
    away = folder.rename(folder.with_suffix(".away"))
    started = site.active(starting=not reloading, running=before.policy if reloading else None)
    assert started.set_aside is not None
    with capture_logs() as logs:
        assert [active.refreshed() for active in (started, before) * 3] == [None] * 6
    assert [entry["event"] for entry in logs] == ["policy version cannot be used"]  # by the one that was not reloaded
    away.rename(folder)
    for active in (started, before):
        taken = active.refreshed()
        assert taken is active.policy
        assert (taken.version[:12], active.set_aside) == (another(1).digest[:12], None)
        assert active.refreshed() is None


def test_a_reload_keeps_the_running_version_while_its_folder_cannot_be_read(site: Site) -> None:
    folder = site.promote(another(1))
    running = site.active(starting=True).policy
    shutil.rmtree(folder)
    with capture_logs() as logs:
        reloaded = site.active(running=running)
        assert (reloaded.policy.version, reloaded.set_aside) == (running.version, None)
        assert reloaded.refreshed() is None
        other = site.active(running=running, settings={"optimism": 0.1}).policy
    assert (other.version.split()[:2], logs) == ([another(1).digest[:12], "optimism=0.1"], [])


def test_a_copy_of_the_live_version_serves_also_where_no_checkpoint_comes_with_its_policy(site: Site) -> None:
    copy = a_checkpoint_of_the_paper()
    kept = keep_version(copy, site.settings().versions_path, site.store.registry, at=1.0, origin="a test")
    shutil.rmtree(kept.folder)
    assert live_checkpoint(kept, None, copy) is copy
    with pytest.raises(CheckpointError):
        live_checkpoint(kept)


@pytest.mark.parametrize("how", ["gone", "cut", "another"])
def test_where_the_live_version_cannot_be_read_a_rejected_checkpoint_does_not_decide(
    site: Site, tmp_path: Path, how: str
) -> None:
    """Nor is it what the gate, `dl2d shadow` and `dl2d policy list` take for the policy in charge."""
    mine = {"checkpoint": str(tmp_path / "mine")}
    write_checkpoint(another(2), tmp_path / "mine")
    site.active(Mode.SHADOW, **mine)
    registry = site.store.registry
    registry.change("dl2", another(2).digest, VersionState.REJECTED, at=1.5, by="gate", reason="it is slower")
    folder = site.promote(another(1))
    site.store.record_slot(a_slot(1, ()))
    damage(folder, how)
    for mode in (Mode.LIVE, Mode.SHADOW, Mode.CANARY):
        active = site.active(mode, starting=True, **mine)
        assert active.policy.name == site.settings().policy.fallback
        assert active.set_aside is not None
        assert (active.set_aside.policy, active.set_aside.version) == ("dl2", another(1).digest[:12])
        with pytest.raises(CheckpointError):
            current_checkpoint(site.settings(mode, **mine), registry, "dl2")
    write_checkpoint(another(1), folder)
    assert site.active(starting=True, **mine).policy.version.startswith(another(1).digest[:12])


@pytest.mark.parametrize("kept", ["configured", "shipped"])
def test_an_equal_checkpoint_takes_the_place_of_the_live_versions_folder(site: Site, tmp_path: Path, kept: str) -> None:
    checkpoint = another(1) if kept == "configured" else with_checkpoint().checkpoint
    write_checkpoint(checkpoint, tmp_path / "mine")
    shutil.rmtree(site.promote(checkpoint))
    mine = {"checkpoint": str(tmp_path / "mine")} if kept == "configured" else {}
    active = site.active(starting=True, **mine)
    assert (active.policy.version[:12], active.set_aside) == (checkpoint.digest[:12], None)
    assert active.refreshed() is None


def test_settings_that_no_version_takes_are_refused_also_where_one_is_live(site: Site) -> None:
    site.promote(another(1))
    with pytest.raises(CheckpointError, match="resize_seconds at least 0"):
        site.active(settings={"resize_seconds": -1})


def test_a_store_that_is_away_changes_nothing(site: Site) -> None:
    active = site.active()
    site.store.close()
    with capture_logs() as logs:
        assert active.refreshed() is None
    assert [entry["event"] for entry in logs] == ["cannot look up the live policy version"]


def test_versions_that_cannot_be_kept_stop_nobody(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings.model_validate(
        {"state_dir": tmp_path, "policy": {"name": "dl2"}, "learning": {"folder": tmp_path / "file" / "below"}}
    )
    with capture_logs() as logs:
        active = ActiveVersion(settings, site.store, lambda: 7.0)
    assert [entry["event"] for entry in logs] == ["the registry of policies cannot be written"]
    assert active.policy.version.startswith(with_checkpoint().checkpoint.digest[:12])
    assert active.refreshed() is None


def test_a_daemon_changes_its_policy_between_two_slots(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By command, while a job trains; old and new decisions come out the same again."""
    from cli.conftest import Ran  # noqa: PLC0415

    from dl2d.cli import main  # noqa: PLC0415

    def dl2d(*arguments: str) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([*arguments, "-c", str(cluster.config)])
        said = capfd.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    def decides(digest: str) -> bool:
        slot = cluster.store.slots(limit=1)[0]
        return slot.policy == "dl2" and slot.policy_version == f"{digest[:12]} optimism=0.5 slot_seconds=1.0"

    settings = {
        "policy": {"name": "dl2", "settings": {"optimism": 0.5}},
        "schedule": {"poll_seconds": 0.5, "slot_seconds": 1},  # a slot is waited for again and again
    }
    with LocalCluster(tmp_path, settings) as cluster:
        job = cluster.train("mine", "--step-seconds", "0.02", epochs=300, max_workers=2, max_ps=1)
        base = with_checkpoint().checkpoint.digest
        cluster.wait_until(lambda: cluster.confirmed(job) != (0, 0) and decides(base), "it trains")
        write_checkpoint(another(1), tmp_path / "better")
        done = dl2d("policy", "promote", str(tmp_path / "better"), "--force", "--reason", "a test", "--json")
        assert (done.status, done.json["state"]) == (0, "live"), done.err
        cluster.wait_until(lambda: decides(another(1).digest), "the next slot is decided by the new version")
        assert dl2d("policy", "rollback").status == 0
        cluster.wait_until(lambda: decides(base), "and one after it by the old version")
        again = dl2d("policy", "promote", another(1).digest[:8], "--force", "--reason", "once more")
        assert again.status == 0, again.err
        cluster.wait_until(lambda: decides(another(1).digest), "once more")
        folder = Path(next(each.folder for each in cluster.store.registry.versions("dl2") if each.state == "live"))
        away = folder.rename(folder.with_suffix(".away"))
        cluster.hang_up()
        cluster.wait_until(lambda: '"event": "reloaded"' in cluster.said(), "it reloads while the folder is away")
        slot = cluster.store.last_slot_number()
        cluster.wait_until(lambda: cluster.store.last_slot_number() > slot + 1, "it goes on deciding")
        assert decides(another(1).digest)
        away.rename(folder)
        told = dl2d("why", "mine", "--all", "--recompute", "--json")
        assert told.status == 0, told.out
        versions = {entry["policy_version"].split()[0] for entry in told.json["decisions"]}
        assert versions == {base[:12], another(1).digest[:12]}
        listed = dl2d("policy", "list", "--json").json
        assert [(each["digest"], each["state"]) for each in listed["versions"]] == [
            (another(1).digest, "live"), (base, "retired")
        ]  # fmt: skip
        assert len(listed["changes"]) == 7
        assert "a test" in dl2d("policy", "list", "--json").out
        assert base[:12] in dl2d("policy", "list").out
        assert cluster.stop() == 0
