from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Architecture
from dl2d.simulation.speeds.model_profiles import SPEED_KINDS, load_profile, parse_profile, profile_names
from dl2d.simulation.speeds.speed_models import AllReduce, Physical, PsSync, SpeedModel

REQUIRED = {
    "resnet-50", "vgg-16", "resnext-110", "inception-bn", "seq2seq", "cnn-text-classification", "dssm", "word-lm",
    "bert", "gpt-2",
}  # fmt: skip


def written(name: str):
    return json.loads(
        (resources.files("dl2d.simulation.speeds") / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    )


def seconds_per_sample(name: str) -> float:
    """Of one worker: as measured, or three times the operations of a forward pass at the rate that is reached."""
    facts = written(name)["compute"]
    if facts["basis"] == "measured":
        return 1.0 / facts["samples_per_second"]
    return 3 * facts["forward_flops"] / facts["achieved_flops_per_second"]


def test_the_library_has_what_was_promised() -> None:
    assert set(profile_names()) >= REQUIRED
    assert load_profile("ctc") is load_profile("cnn-text-classification")
    assert load_profile("wlm").name == "word-lm"
    aliases = [alias for name in profile_names() for alias in load_profile(name).aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_speeds_are_positive_and_finite_and_obey_physics(name: str) -> None:
    profile = load_profile(name)
    assert set(profile.speeds) >= {"ps-sync", "physical", "allreduce"}
    workers = np.arange(1, 17)
    for kind, speed in profile.speeds.items():
        grid = speed.grid(16, 16)[1:, 1:]
        assert np.isfinite(grid).all()
        assert (grid > 0).all()
        # w workers are never more than w times one.
        assert (grid <= grid[:, :1] * workers * (1 + 1e-9)).all(), kind
        # One worker is never faster than it computes, to the rounding of the file.
        alone = 1.0 / seconds_per_sample(name)
        assert grid[:, 0].max() <= alone * (1 + 1e-4), kind
    physical = profile.speeds["physical"].grid(16, 16)[1:, 1:]
    cautious = profile.speeds["ps-sync"].grid(16, 16)[1:, 1:]
    # Servers never slow a job down in the physical model, and ps-sync, which adds what physical overlaps, is slower.
    assert (np.diff(physical, axis=0) >= -1e-9).all()
    assert (cautious <= physical).all()
    # With one server, its link limits: at some number of workers one more is a loss.
    assert cautious[0].argmax() < 15
    # Each of the first servers helps a job that has enough workers to saturate one.
    assert cautious[1, 7] > cautious[0, 7]
    assert profile.speed(Architecture.PS) is profile.speeds["ps-sync"]
    assert profile.speed(Architecture.ALLREDUCE) is profile.speeds["allreduce"]


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def derived(name: str) -> dict[str, SpeedModel]:
    """The speeds that docs/workloads.md says follow from a profile's facts, to six significant digits."""
    file = written(name)
    facts, batch, seconds, size = (
        file["hardware"],
        file["batch"],
        rounded(seconds_per_sample(name)),
        4 * file["parameters"],
    )
    worker, ps = facts["worker_bandwidth_bytes_per_second"], facts["ps_bandwidth_bytes_per_second"]
    fixed = rounded(facts["overhead_seconds"] + 2.0 * size / worker)
    servers = 2.0 * size / ps + size / facts["ps_update_bytes_per_second"]
    theta = (seconds, fixed, rounded(servers), facts["per_worker_seconds"], facts["per_ps_seconds"])
    common = {"batch": batch, "compute": seconds, "model_bytes": size, "overhead": facts["overhead_seconds"]}
    return {
        "ps-sync": PsSync(theta, batch),
        "physical": Physical(worker_bandwidth=worker, ps_bandwidth=ps, **common),
        "allreduce": AllReduce(bandwidth=worker, latency=facts["ring_latency_seconds"], **common),
    }


@pytest.mark.parametrize("name", profile_names())
def test_files_hold_what_their_facts_give(name: str) -> None:
    speeds = load_profile(name).speeds
    assert derived(name) == {kind: speed for kind, speed in speeds.items() if kind != "measured"}
    if "measured" in speeds:
        one = speeds["measured"].samples_per_second(1, 0)
        assert one == pytest.approx(written(name)["compute"]["samples_per_second"], rel=1e-5)


@pytest.mark.parametrize("name", profile_names())
def test_files_name_their_sources_and_licences(name: str) -> None:
    file = written(name)
    text = " ".join(file["sources"])
    assert "Architecture:" in text
    assert "Data set size:" in text
    if file["compute"]["basis"] == "measured":
        assert "Apache License 2.0" in text or "MIT License" in text
    else:
        assert "assumed" in file["compute"]["note"] or "Rate:" in text
    assert "Assumed" in file["derivation"]


def test_derived_rings_stay_near_measured_ones() -> None:
    """Only the speed of one GPU went into the formula, so larger sizes check it: within a factor of two."""
    compared = 0
    for name in profile_names():
        speeds = load_profile(name).speeds
        if "measured" in speeds:
            for workers in (2, 4, 8, 16):
                ratio = speeds["allreduce"].samples_per_second(workers, 0) / speeds["measured"].samples_per_second(
                    workers, 0
                )
                assert 0.5 < ratio < 2.0, (name, workers)
                compared += 1
    assert compared == 20


def test_the_schema_is_strict() -> None:
    good = written("resnet-50")
    assert parse_profile(good, where="x") == load_profile("resnet-50")

    def refused(given) -> str:
        with pytest.raises(WorkloadError) as caught:
            parse_profile(given, where="x")
        assert str(caught.value).startswith("x: ")
        return caught.value.key

    for key in ("name", "aliases", "samples_per_epoch", "worker", "ps", "max_workers", "max_ps", "speeds"):
        assert key in refused({other: value for other, value in good.items() if other != key})
    assert refused(good | {"extra": 1}) == "extra"
    assert refused(good | {"speeds": good["speeds"] | {"extra": 1}}) == "speeds.extra"
    for key in good["speeds"].keys() - {"measured"}:
        speeds = {kind: speed for kind, speed in good["speeds"].items() if kind != key}
        assert refused(good | {"speeds": speeds}) == f"speeds.{key}"
    assert refused(good | {"speeds": good["speeds"] | {"allreduce": good["speeds"]["physical"]}}) == "speeds.allreduce"


def test_an_unknown_profile_gets_a_hint() -> None:
    with pytest.raises(WorkloadError, match=r"did you mean resnet-50\?"):
        load_profile("resnet-5")
    assert SPEED_KINDS[0] == "ps-sync"
