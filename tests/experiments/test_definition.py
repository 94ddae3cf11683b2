from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.errors import WorkloadError
from dl2d.experiments.definition import (
    Case,
    Experiment,
    builtin_names,
    describe_experiment,
    digest,
    find_experiment,
    read_experiment,
    write_experiment,
)
from dl2d.experiments.participants import plain
from dl2d.experiments.run_simulation import cells_of
from dl2d.experiments.variants_of_definition import Scale, at_scale, changed
from dl2d.simulation.simulation_presets import PresetName

PLAIN = {
    "name": "mine",
    "version": 3,
    "description": "A few\nwords.",
    "workloads": ["generator:dl2?jobs=3"],
    "policies": ["fifo", "drf"],
    "seeds": 3,
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "mine.yaml"
    content = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_defaults(tmp_path: Path) -> None:
    assert read_experiment(write(tmp_path)) == Experiment(
        name="mine", version="3", description="A few words.",
        cases=(Case(name="dl2?jobs=3", sources=("generator:dl2?jobs=3",)),),
        participants=(plain("fifo"), plain("drf")), baseline="fifo", seeds=(0, 1, 2),
        placement="load_balance", most_slots=100_000,
    )  # fmt: skip


def test_workloads_have_their_own_rules_or_those_of_the_experiment(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        preset="dl2-paper",
        **{"with": {"a": 1, "b": True}},
        workloads=[
            {"name": "one", "source": "generator:dl2", "with": {"b": 0.5, "c": "x"}},
            {"source": "generator:poisson"},
            {"source": "generator:bursty", "preset": "dl2-paper"},
        ],
    )
    one, two, three = read_experiment(path).cases
    assert (one.name, one.preset, one.options) == ("one", PresetName.DL2_PAPER, {"a": "1", "b": "0.5", "c": "x"})
    assert (two.name, two.preset, two.options) == ("poisson", PresetName.DL2_PAPER, {"a": "1", "b": "true"})
    assert (three.preset, three.options) == (PresetName.DL2_PAPER, {"a": "1", "b": "true"})


def test_cells_are_every_workload_with_every_policy_and_every_seed(tmp_path: Path) -> None:
    path = write(tmp_path, workloads=["generator:dl2", "generator:poisson"], seeds=[4, 9])
    cells = cells_of(read_experiment(path))
    assert [cell.number for cell in cells] == list(range(8))
    kinds = {(cell.case.name, cell.policy, cell.seed) for cell in cells}
    assert kinds == {
        (name, policy, seed) for name in ("dl2", "poisson") for policy in ("drf", "fifo") for seed in (4, 9)
    }
    assert {cell.seed for cell in cells if cell.keeps_allocations} == {4}


names = st.text("abcdefgh -_.é|<&", min_size=1, max_size=20).map(str.strip).filter(bool)


@given(
    case_names=st.lists(names, min_size=1, max_size=3, unique=True),
    options=st.dictionaries(names, names, max_size=3),
    description=names,
    policies=st.lists(names, min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3, unique=True),
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, case_names, options, description, policies, seeds
) -> None:
    experiment = Experiment(
        name="x", version="1+changed", description=" ".join(description.split()),
        cases=tuple(Case(name=name, sources=("generator:dl2",), preset=PresetName.DL2_PAPER, options=options)
                    for name in case_names),
        participants=tuple(map(plain, policies)), baseline=policies[-1],
        seeds=tuple(seeds), placement="p", most_slots=5,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("written") / "x.yaml"
    path.write_text(write_experiment(experiment), encoding="utf-8")
    assert read_experiment(path) == experiment


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "mine.yaml: name: missing"),
        ({"version": None}, "mine.yaml: version: missing"),
        ({"version": True}, "version: expected a number or a text, got True"),
        ({"polices": ["drf"], "policies": None}, "policies: missing (is 'polices' meant?)"),
        ({"seed": 3}, "seed: unknown key (did you mean seeds?)"),
        ({"workloads": []}, "workloads: expected a list of 1 to 100 entries, got []"),
        ({"workloads": [3]}, "workloads[0]: expected an object {...}, got 3"),
        ({"workloads": [{"name": "x"}]}, "workloads[0].source: missing"),
        ({"workloads": [{"source": "a", "sed": 1}]}, "workloads[0].sed: unknown key"),
        ({"workloads": ["generator:dl2", "generator:dl2"]}, "workloads: two workloads are called 'dl2'"),
        ({"workloads": [{"source": "a", "name": "two\nlines"}]}, "workloads[0].name: expected one line"),
        ({"workloads": [{"source": "a", "with": [1]}]}, "workloads[0].with: expected an object"),
        ({"preset": "dl2-paper", "with": {"x": [1]}}, "with.x: expected a number or a text, got [1]"),
        ({"preset": "dl2-papr"}, "preset: expected one of"),
        ({"preset": "dl2-papr"}, "(did you mean dl2-paper?)"),
        ({"policies": ["drf", "drf"]}, "policies: given twice: 'drf'"),
        ({"policies": [1]}, "policies[0]: expected the name of a policy or an object {...}, got 1"),
        ({"baseline": "dfr"}, "baseline: expected one of drf, fifo, got 'dfr' (did you mean drf?)"),
        (
            {"seeds": 0},
            "seeds: expected how many (1 to 1000) or a list of different whole numbers from 0 to 9223372036854775807",
        ),
        ({"seeds": [1, 1]}, "seeds: expected"),
        ({"seeds": [-1]}, "seeds: expected"),
        ({"seeds": "5"}, "seeds: expected"),
        ({"most_slots": 0}, "most_slots: expected a whole number"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)) as caught:
        read_experiment(write(tmp_path, **changes))
    assert str(tmp_path / "mine.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nname: b\n", "the key 'name' is given twice"),
        ("- 1\n", "expected an object"),
        ("name: [\n", "is not YAML"),
        ("1: 2\n", "the key 1 is not text"),
        ("a: !!python/object:os.system {}\n", "is not YAML"),
        ("\x00", "is not YAML"),
        ("a: " + "[" * 5000, "is not YAML"),
        ("#" * 1024**2 + "\n", "larger than 1 MiB"),
    ],
)
def test_what_is_no_definition_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=re.escape(words)):
        read_experiment(path)


def test_unknown_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=re.escape("smok: there is no such experiment (did you mean smoke?)")):
        find_experiment("smok")
    with pytest.raises(WorkloadError, match=r"gone\.yaml: cannot be read: No such file"):
        find_experiment("gone.yaml")
    with pytest.raises(WorkloadError, match="cannot be read"):
        find_experiment(f"{tmp_path}/")


def test_files_lie_beside_the_definition_and_a_slip_in_the_kind_of_source_is_left_to_be_told(tmp_path: Path) -> None:
    sources = ["jobs.json", "itp:log.csv?jobs=3", "sacc:x.csv", str(tmp_path / "abs.json")]
    cases = read_experiment(write(tmp_path, workloads=sources)).cases
    assert [case.sources[0] for case in cases] == [
        f"{tmp_path}/jobs.json", f"itp:{tmp_path}/log.csv?jobs=3", "sacc:x.csv", f"{tmp_path}/abs.json",
    ]  # fmt: skip
    assert [case.name for case in cases] == ["jobs.json", "itp:log.csv?jobs=3", "sacc:x.csv", "abs.json"]


def test_the_digest_follows_what_decides_on_results_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "jobs.json").write_text("{}")
    first = digest(read_experiment(write(tmp_path, workloads=["jobs.json"])))
    assert first == digest(read_experiment(write(other, workloads=["jobs.json"], version=4, description="Else.")))
    assert first != digest(read_experiment(write(tmp_path, workloads=["jobs.json"], seeds=4)))
    assert first != digest(read_experiment(write(tmp_path, workloads=["jobs.json"], policies=["drf", "fifo"])))
    (other / "jobs.json").write_text("{ }")
    assert first != digest(read_experiment(write(other, workloads=["jobs.json"])))
    with pytest.raises(WorkloadError, match=r"gone\.json: cannot be read"):
        digest(read_experiment(write(tmp_path, workloads=["gone.json"])))


def test_changes_of_the_command_line_show_in_the_version(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path, baseline="drf"))
    assert changed(experiment) == changed(experiment, seeds=(0, 1, 2)) == experiment
    fewer = changed(experiment, policies=["fifo", "fifo"], seeds=(5,))
    assert (fewer.policies, fewer.baseline, fewer.seeds, fewer.version) == (("fifo",), "fifo", (5,), "3+changed")
    assert changed(fewer, seeds=(6,)).version == "3+changed"


#: Version and digest of what ships, and digest at scale quick. A changed definition needs a new version: then all
#: change here.
SHIPPED = json.loads((Path(__file__).parent / "digests.json").read_text())


def test_shipped_experiments_have_a_new_version_when_they_change() -> None:
    found = [find_experiment(name) for name in builtin_names()]
    quick = {each.name: [digest(at_scale(each, Scale.QUICK))] if each.quick else [] for each in found}
    assert {each.name: [each.version, digest(each), *quick[each.name]] for each in found} == SHIPPED


@pytest.mark.parametrize("name", builtin_names())
def test_shipped_experiments_are_called_as_their_file(name: str) -> None:
    experiment = find_experiment(name)
    assert experiment.name == name
    assert describe_experiment(experiment)["description"]
