from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import (
    Claim,
    Experiment,
    Quick,
    builtin_names,
    digest,
    find_experiment,
    read_experiment,
    write_experiment,
)
from dl2d.experiments.participant_training import combinations
from dl2d.experiments.participants import (
    SEEDS_EACH,
    TRAINING_SEEDS,
    TUNING_SEEDS,
    VALIDATION_SEEDS,
    Design,
    Participant,
    Training,
    dl2_paper_settings,
    dl2_settings,
    plain,
)
from dl2d.experiments.run_simulation import cells_of
from dl2d.experiments.simulation_setup import tuned
from dl2d.experiments.variants_of_definition import Scale, at_scale, changed, on_files

CLAIM = {
    "policy": "paper", "against": "drf", "change": -44.1, "says": "faster\nby far", "source": "a paper", "why": "luck",
}  # fmt: skip
PLAIN = {
    "name": "mine",
    "version": 1,
    "description": "x",
    "training": {"design": "dl2-original", "sources": ["generator:dl2?jobs=3"], "settings": {"iterations": 100}},
    "workloads": [{"name": "one", "source": "generator:dl2?jobs=3", "preset": "dl2-paper"}],
    "policies": [
        "drf",
        {"name": "paper", "training": {"settings": {"window": 5}}},
        {"name": "imitated", "training": {"types": 2, "settings": {"iterations": 0}}},
        {"name": "jumps", "training": {"design": "jumps", "draws": 4}},  # as earlier versions called it
        {"name": "careful dl2", "policy": "dl2", "settings": {"resize_seconds": 20}},
    ],
    "claims": [CLAIM],
    "seeds": 6,
    "trainings": 2,
    "minutes": 30,
    "quick": {"seeds": 2, "iterations": 0.1, "draws": 8, "minutes": 1},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **changes}, sort_keys=False))
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Experiment:
    return read_experiment(write(tmp_path))


def test_participants_have_what_all_share_and_what_is_their_own(mine: Experiment) -> None:
    sources = ("generator:dl2?jobs=3",)
    assert mine.policies == ("drf", "paper", "imitated", "jumps", "careful dl2")
    assert mine.participant("drf") == plain("drf")
    assert mine.participant("paper") == Participant(
        name="paper", policy="dl2-original",
        training=Training(design=Design.DL2_PAPER, sources=sources, settings={"iterations": 100, "window": 5}),
    )  # fmt: skip
    assert mine.participant("imitated").training == Training(
        design=Design.DL2_PAPER, sources=sources, types=2, settings={"iterations": 0}
    )
    # Settings of one design say nothing to another.
    assert mine.participant("jumps") == Participant(
        name="jumps", policy="dl2", training=Training(design=Design.DL2, sources=sources, draws=4)
    )
    assert mine.participant("careful dl2") == Participant(
        name="careful dl2", policy="dl2", settings={"resize_seconds": 20}
    )
    assert mine.claims == (
        Claim(policy="paper", against="drf", change=-44.1, says="faster by far", source="a paper", why="luck"),
    )
    assert mine.quick == Quick(seeds=(0, 1), trainings=1, iterations=0.1, draws=8, minutes=1.0)


def test_what_is_written_is_read_again(mine: Experiment, tmp_path: Path) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(write_experiment(mine))
    assert read_experiment(path) == mine


def test_words_and_the_other_scale_are_not_in_the_digest(mine: Experiment, tmp_path: Path) -> None:
    assert digest(mine) == digest(replace(mine, claims=(), minutes=None, quick=None, version="2"))
    for change in (
        {"trainings": 3},
        {"training": {**PLAIN["training"], "draws": 33}},
        {"policies": [*PLAIN["policies"][:-1], {"name": "careful dl2", "policy": "dl2"}]},
    ):
        assert digest(mine) != digest(read_experiment(write(tmp_path, **change)))


def test_quick_is_less_of_everything(mine: Experiment) -> None:
    quick = at_scale(mine, Scale.QUICK)
    assert (quick.version, quick.seeds, quick.trainings, quick.minutes, quick.quick) == (
        "1+quick", (0, 1), 1, 1.0, None,
    )  # fmt: skip
    paper, imitated, jumps = (quick.participant(name).training for name in ("paper", "imitated", "jumps"))
    assert paper.settings == {"iterations": 10, "window": 5, "validate_every": 2}
    # What does not learn goes on not learning.
    assert imitated.settings["iterations"] == 0
    assert (jumps.settings, jumps.draws, paper.draws) == ({"iterations": 15, "every": 1}, 4, 8)
    assert quick.participant("careful dl2") == mine.participant("careful dl2")
    assert at_scale(mine, Scale.FULL) == replace(mine, quick=None)
    with pytest.raises(WorkloadError, match="mine: quick: this experiment has one scale only"):
        at_scale(replace(mine, quick=None), Scale.QUICK)


def test_of_ones_own_files_none_is_both_learned_from_and_tested_on(tmp_path: Path) -> None:
    cases = [
        {"name": "one", "source": "generator:dl2", "preset": "dl2-paper"},
        {"name": "more", "source": "generator:dl2?nodes=9", "preset": "dl2-paper"},
        {"name": "noisy", "source": "generator:dl2", "preset": "dl2-paper", "with": {"speed_noise": 0.1}},
    ]
    claims = [{**CLAIM, "workload": "more"}]
    given = on_files(
        read_experiment(write(tmp_path, workloads=cases, claims=claims)), [f"/{number}.json" for number in range(12)]
    )
    assert [case.name for case in given.cases] == ["files, dl2-paper", "files, dl2-paper, speed_noise 0.1"]
    assert given.claims[0].workload == "files, dl2-paper"
    training = given.participant("paper").training
    assert [case.sources for case in given.cases] == [("/0.json", "/5.json", "/10.json")] * 2
    assert training.validation == ("/1.json", "/6.json", "/11.json")
    assert training.sources == ("/2.json", "/3.json", "/4.json", "/7.json", "/8.json", "/9.json")
    assert given.cases[0].source(7) == "/5.json"
    assert given.version == "1+changed"
    with pytest.raises(WorkloadError, match="mine: needs 3 or more files: to learn from, to choose by"):
        on_files(given, ["/a.json", "/b.json"])
    untrained = read_experiment(write(tmp_path, policies=["drf"], claims=[CLAIM | {"policy": "drf"}]))
    assert on_files(untrained, ["/a.json"]).cases[0].sources == ("/a.json",)


def test_seeds_share_trainings_and_tests_are_never_drawn_from_theirs(mine: Experiment) -> None:
    cells = [cell for cell in cells_of(mine) if cell.preparation is not None]
    by_seed = {(cell.policy, cell.seed): cell.preparation for cell in cells}
    assert len({preparation.key for preparation in by_seed.values()}) == 3 * 2
    assert by_seed["paper", 0] == by_seed["paper", 4] != by_seed["paper", 1]
    assert by_seed["paper", 5].seed == 1
    assert SEEDS_EACH * 100 <= TRAINING_SEEDS
    starts = (0, TRAINING_SEEDS, VALIDATION_SEEDS, TUNING_SEEDS)
    assert all(later - earlier >= 100 * SEEDS_EACH for earlier, later in itertools.pairwise(starts))


def test_policies_that_are_left_out_take_their_participants_and_claims_with_them(mine: Experiment) -> None:
    fewer = changed(mine, policies=["drf", "jumps"])
    assert (fewer.participants, fewer.claims) == ((plain("drf"), mine.participant("jumps")), ())


def test_tuning_tries_all_combinations() -> None:
    participant = Participant(
        name="t", policy="tetris", settings={"a": 1.0}, tune={"b": (1, 2), "placement": ("x", "y")}
    )
    tried = combinations(participant.tune)
    assert [tuple(each.values()) for each in tried] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert tuned(participant, tried[2]) == Participant(
        name="t", policy="tetris", settings={"a": 1.0, "b": 2}, placement="x"
    )


def test_settings_are_of_the_designs_own_kinds() -> None:
    made = dl2_paper_settings(Design.DL2_PAPER, {"network": "dense", "gamma": 0, "iterations": 3.0, "critic": False})
    assert (made.network.value, made.gamma, made.iterations, made.critic) == ("dense", 0.0, 3, False)
    assert dl2_paper_settings(Design.PAPER, {}).reward.value == "progress"
    assert dl2_settings({"iterations": 7}, seed=4).seed == 4


def entry(**changes: object) -> dict[str, object]:
    return {"policies": ["drf", {"name": "x", **changes}], "claims": [CLAIM | {"policy": "x"}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (entry(polcy="dl2"), "policies[1].polcy: unknown key (did you mean policy?)"),
        (
            entry(training={"settings": {"windw": 3}}),
            "policies[1].training.settings.windw: unknown key (did you mean window?)",
        ),
        (
            entry(training={"settings": {"window": 2.5}}),
            "window: expected a whole number from 1 to 1000, got 2.5",
        ),
        (
            entry(training={"settings": {"window": True}}),
            "window: expected a whole number from 1 to 1000, got True",
        ),
        (entry(training={"settings": {"network": "deep"}}), "settings.network: expected one of dense, shared"),
        (entry(training={"settings": {"window": 0}}), "settings.window: expected a whole number from 1"),
        (entry(training={"settings": {"gamma": 1.5}}), "settings.gamma: expected a number, 0 or more and at most 1"),
        (entry(training={"settings": {"minibatch": 9000}}), "minibatch: 9000 is more than the 8192 samples of a round"),
        (entry(training={"settings": {"replay": 10}}), "replay: 10 is less than the 8192 samples of a round"),
        (entry(training={"settings": {"teacher": "drv"}}), "settings.teacher: expected one of drf, fifo"),
        (entry(training={"settings": [1]}), "settings: expected an object"),
        (entry(training={"design": "dl2-orginal"}), "(did you mean dl2-original?)"),
        (
            entry(training={"design": "dl2", "settings": {"seed": 3}}),
            "settings.seed: cannot be set: the experiment trains",
        ),
        (entry(training={"design": "dl2", "before": {"types": 1}}), "before: the design dl2 begins with nothing"),
        (entry(training={"sources": ["generator:dl2?seed=3"]}), "fixes its seed"),
        (entry(training={"sources": ["a.json"]}), "training.validation: name workloads to choose checkpoints by"),
        (entry(training={}, policy="dl2"), "the training makes a checkpoint for dl2-original, not dl2"),
        (entry(tune={"a": []}), "policies[1].tune.a: expected a list of 1 to 50 entries"),
        (entry(tune={"placement": [1]}), "tune.placement: expected a list"),
        (entry(tune={"a": [1]}, settings={"a": 1}), "tune: a is given and tuned"),
        (entry(settings={"a": "x"}), "settings.a: expected a number"),
        ({"seeds": [TRAINING_SEEDS]}, "seeds: those from 1000000 on are kept for training and tuning"),
        ({"claims": [{**CLAIM, "against": "dfr"}]}, "claims[0].against: expected one of"),
        ({"claims": [{key: CLAIM[key] for key in CLAIM if key != "why"}]}, "claims[0].why: missing"),
        ({"quick": {"seeds": 2, "iterations": 2}}, "quick.iterations: expected a number"),
        ({"training": {"design": "dl2"}}, "training.sources: name one or more workloads to learn from"),
        (
            {**entry(tune={"shortness": [1]}), "workloads": ["a.json"]},
            "workloads[0].aside: name workloads to tune on: this one is not drawn",
        ),
    ],
)
def test_mistakes_name_file_and_key(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)) as caught:
        read_experiment(write(tmp_path, **changes))
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize("name", builtin_names())
def test_shipped_experiments_say_how_long_they_take_and_claims_say_why(name: str) -> None:
    experiment = find_experiment(name)
    if any(participant.training for participant in experiment.participants):
        assert experiment.minutes is not None
        assert experiment.quick is not None
        assert experiment.quick.minutes is not None
        assert at_scale(experiment, Scale.QUICK).seeds
    for claim in experiment.claims:
        assert "1909.06040" in claim.source
        assert len(claim.why) > 20
