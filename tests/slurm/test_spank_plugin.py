"""Options of sbatch: what the SPANK plug-in takes and refuses, beside what the daemon does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from spank_plugin import build, why_not

from dl2d.core.errors import RequestError
from dl2d.core.job_request_parser import RequestRules, parse_request

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

RULES = RequestRules(max_workers=10_000, max_ps=10_000)
REQUEST = {"model": "other", "epochs": "3", "samples_per_epoch": "10", "worker": "cpu:1"}
#: Options by keys of #DL2 lines, each with a good value.
GOOD = {
    "model": ("dl2-model", "resnet-50"),
    "epochs": ("dl2-epochs", "7.5"),
    "samples_per_epoch": ("dl2-samples-per-epoch", "1.2e6"),
    "steps_per_epoch": ("dl2-steps-per-epoch", "5000"),
    "batch": ("dl2-batch", "256"),
    "worker": ("dl2-worker", "cpu:2,gpu:1,memory:4G"),
    "ps": ("dl2-ps", "cpu:1"),
    "min_workers": ("dl2-min-workers", "2"),
    "max_workers": ("dl2-max-workers", "8"),
    "min_ps": ("dl2-min-ps", "1"),
    "max_ps": ("dl2-max-ps", "4"),
    "allowed_workers": ("dl2-sizes", "1,2,4"),
    "architecture": ("dl2-arch", "ps"),
    "durability": ("dl2-durability", "none"),
}
NUMBERS = (
    "1",
    "1.0",
    "+1",
    "1e3",
    "0.5",
    "-1",
    "0",
    "10000",
    "10001",
    "1000000",
    "1e6",
    "1000001",
    "1e9",
    "1e300",
    "1e999",
)
WRONG_NUMBERS = ("", "x", "1x", "--1", "1.2.3", "e", "inf", "nan", "0x10", "1,2")
VALUES = {
    "model": ("a", "A.b_c+d/e:f-1", "1", "-a", "_a", ".a", "a" * 128, "a" * 129, "a" * 300, ""),
    "worker": (
        *(
            "cpu:1",
            "cpu:0.5,gpu:2",
            "memory:100",
            "memory:4G",
            "memory:4GiB",
            "memory:1.5TB",
            "memory:4gb",
            "memory:512m",
        ),
        *(
            "cpu",
            "cpu:",
            ":1",
            "cpu:x",
            "cpu:-1",
            "cpu:1,",
            "cpu:1,,gpu:1",
            "Cpu:1",
            "9:1",
            "memory:G",
            "memory:4X",
            "",
        ),
    ),
    "allowed_workers": (
        "1",
        "1,2,4",
        "10000",
        "powers-of-two",
        "0",
        "1,0",
        "10001",
        "1,",
        ",",
        "1.5",
        "-1",
        "powers",
        "",
    ),
    "architecture": ("ps", "allreduce", "PS", "ring", ""),
    "durability": ("none", "durable", "yes", ""),
} | dict.fromkeys(
    ("epochs", "samples_per_epoch", "batch", "min_workers", "max_workers", "min_ps", "max_ps"),
    (*NUMBERS, *WRONG_NUMBERS),
)
CASES = [(key, value) for key, values in VALUES.items() for value in values]


@pytest.fixture(scope="module")
def sbatch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in, linked with a stand-in for sbatch."""
    program = tmp_path_factory.mktemp("spank") / "sbatch"
    build(program, str(Path(__file__).with_name("spank_host.c")))
    return program


def answers(sbatch: Path, *given: tuple[str, str]) -> list[str]:
    lines = "".join(f"{option} {value}\n" for option, value in given)
    done = subprocess.run([sbatch], input=lines, capture_output=True, text=True, timeout=60, check=True, env={})
    return done.stdout.splitlines()


def test_the_plugin_compiles_without_warnings(tmp_path: Path) -> None:
    build(tmp_path / "dl2d_spank.so")


def test_each_key_of_a_request_has_an_option(sbatch: Path) -> None:
    said = answers(sbatch, *GOOD.values())
    assert said[: len(GOOD)] == ["ok"] * len(GOOD)
    assert said[len(GOOD) :] == [f"DL2_{key.upper()}={value}" for key, (_, value) in GOOD.items()]
    given = {key: value for key, (_, value) in GOOD.items()}
    assert parse_request(given, rules=RULES).max_workers == 8
    with pytest.raises(RequestError, match="known are") as unknown:
        parse_request({**given, "other": "1"}, rules=RULES)
    known = str(unknown.value).partition("known are ")[2].split(", ")
    # Names are sbatch's --job-name, and another consistency than the default is refused.
    assert set(known) - set(GOOD) == {"name", "consistency"}


def is_accepted(key: str, value: str) -> bool:
    """Whether the daemon accepts a value; an empty one cannot stand in a ``#DL2`` line."""
    try:
        without_ps = {"architecture": "allreduce"} if key in ("min_ps", "max_ps") else {}  # 0 is right there
        parse_request({**REQUEST, **without_ps, key: value}, rules=RULES)
    except RequestError:
        return False
    return bool(value)


def test_values_are_refused_that_the_daemon_would_refuse(sbatch: Path) -> None:
    said = answers(sbatch, *((GOOD[key][0], value) for key, value in CASES))[: len(CASES)]
    assert [(case, answer == "ok") for case, answer in zip(CASES, said, strict=True)] == [
        (case, is_accepted(*case)) for case in CASES
    ]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("dl2-epochs", "abc", "--dl2-epochs: expected a number, more than 0 and at most 1e+06, got 'abc'"),
        ("dl2-min-workers", "0", "--dl2-min-workers: expected a whole number from 1 to 10000, got '0'"),
        ("dl2-worker", "cpu", "--dl2-worker: expected amounts of resources such as cpu:2,gpu:1,memory:4G, got 'cpu'"),
        ("dl2-arch", "ring", "--dl2-arch: expected ps or allreduce, got 'ring'"),
        ("dl2-model", "a b", "--dl2-model: expected a name of 1 to 128 characters"),
        ("dl2-model", "a" * 60_000, "got '" + "a" * 60 + "'"),
        ("dl2-model", 'a"#DL2 x', "--dl2-model: expected a name"),
    ],
)
def test_a_refusal_says_what_was_expected(sbatch: Path, option: str, value: str, words: str) -> None:
    (said,) = answers(sbatch, (option, value))
    assert words in said


def test_the_last_value_of_an_option_counts(sbatch: Path) -> None:
    assert answers(sbatch, ("dl2-epochs", "3"), ("dl2-epochs", "12")) == ["ok", "ok", "DL2_EPOCHS=12"]
