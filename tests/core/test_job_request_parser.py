from __future__ import annotations

import math
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.errors import RequestError
from dl2d.core.input_validation import NAME_RULE
from dl2d.core.job_request_parser import MAX_EPOCHS, RequestRules, parse_request, read_directives
from dl2d.core.jobs import Architecture, Consistency, Durability, JobRequest
from dl2d.core.resources import Resources

RULES = RequestRules(models=frozenset({"resnet-50", "vgg-16"}), max_workers=16, max_ps=8)
LEAST = {"model": "resnet-50", "epochs": 90, "samples_per_epoch": 1000, "worker": {"cpu": 2, "gpu": 1}}


def parse(**given_keys: object) -> JobRequest:
    return parse_request({**LEAST, **given_keys}, rules=RULES, where="job.yaml")


def test_what_is_left_out_gets_the_documented_defaults() -> None:
    assert parse() == JobRequest(
        name="resnet-50",
        model="resnet-50",
        epochs=90.0,
        samples_per_epoch=1000.0,
        steps_per_epoch=None,
        batch=None,
        worker=Resources.of(cpu=2, gpu=1),
        ps=Resources.of(cpu=1),
        min_workers=1,
        max_workers=16,
        min_ps=1,
        max_ps=8,
        allowed_workers=(),
        architecture=Architecture.PS,
        consistency=Consistency.SYNC,
        durability=Durability.NONE,
    )


@pytest.mark.parametrize(
    ("given_keys", "size"),
    [
        ({}, (0, 0)),
        ({"min_workers": 4}, (0, 0)),
        ({"max_workers": 4}, (4, 4)),  # as many servers as workers
        ({"max_workers": 100}, (16, 8)),  # as far as the site allows them
        ({"max_workers": 4, "max_ps": 1}, (4, 1)),
        ({"max_workers": 2, "min_ps": 3}, (2, 3)),
        ({"max_workers": 7, "allowed_workers": "powers-of-two", "architecture": "allreduce"}, (4, 0)),
    ],
)
def test_a_declared_maximum_is_the_size_that_the_user_asks_for(
    given_keys: dict[str, object], size: tuple[int, int]
) -> None:
    assert parse(**given_keys).asked_size == size


@pytest.mark.parametrize(("given_keys", "min_ps"), [({}, 2), ({"min_ps": 1}, 1), ({"min_ps": "3"}, 3)])
def test_a_job_with_replicas_has_two_parameter_servers_unless_it_says_otherwise(
    given_keys: dict[str, object], min_ps: int
) -> None:
    request = parse(durability="durable", **given_keys)
    assert (request.durability, request.min_ps, request.max_ps) == (Durability.DURABLE, min_ps, 8)


def test_text_means_the_same_as_numbers() -> None:
    numbers = {"epochs": 2.5, "batch": 64, "min_workers": 2, "max_workers": 8, "max_ps": 4, "allowed_workers": [2, 4]}
    text = {
        "epochs": "2.5", "batch": "64", "min_workers": "2", "max_workers": "8", "max_ps": "4",
        "allowed_workers": "2,4", "worker": "cpu:2,gpu:1", "samples_per_epoch": "1e3",
    }  # fmt: skip
    assert parse(**numbers) == parse(**text)


@pytest.mark.parametrize(
    ("given_keys", "key", "problem"),
    [
        ({"model": None}, "model", "missing"),
        ({"model": ""}, "model", "missing"),
        ({"model": "resnet50"}, "model", "unknown model type 'resnet50' (did you mean resnet-50?)"),
        ({"model": True}, "model", "expected a name"),
        ({"model": ["a"]}, "model", "expected a name"),
        ({"model": "a\nb"}, "model", "expected a name"),
        ({"model": 10**5000}, "model", f"expected {NAME_RULE}, got a huge int"),
        ({"name": "x" * 129}, "name", "expected a name"),
        ({"name": "<script>"}, "name", "expected a name"),
        ({"epochs": None}, "epochs", "missing"),
        ({"epochs": 0}, "epochs", "expected a number, more than 0 and at most 1e+06, got 0"),
        ({"epochs": -1}, "epochs", "more than 0"),
        ({"epochs": MAX_EPOCHS + 1}, "epochs", "at most 1e+06"),
        ({"epochs": 10**400}, "epochs", "at most 1e+06, got 1000"),
        ({"epochs": 10**5000}, "epochs", "at most 1e+06, got a huge int"),
        ({"epochs": math.nan}, "epochs", "expected a number"),
        ({"epochs": "inf"}, "epochs", "expected a number"),
        ({"epochs": "many"}, "epochs", "got 'many'"),
        ({"epochs": True}, "epochs", "got True"),
        ({"epochs": [1]}, "epochs", "got [1]"),
        ({"epochs": "9" * 1000}, "epochs", "99..."),
        ({"samples_per_epoch": None}, "samples_per_epoch", "missing (or give steps_per_epoch)"),
        ({"samples_per_epoch": 0}, "samples_per_epoch", "more than 0"),
        ({"steps_per_epoch": -3}, "steps_per_epoch", "more than 0"),
        ({"batch": 0}, "batch", "whole number from 1"),
        ({"batch": 1.5}, "batch", "whole number"),
        ({"batch": True}, "batch", "whole number"),
        ({"worker": None}, "worker", "missing"),
        ({"worker": {}}, "worker", "is nothing"),
        ({"worker": {"cpu": 0}}, "worker", "is nothing"),
        ({"worker": {"cpu": "x"}}, "worker.cpu", "expected a number"),
        ({"worker": "cpu"}, "worker", "is not name:amount"),
        ({"ps": {"gpu": -1}}, "ps", "gpu: an amount must be"),
        ({"min_workers": 0}, "min_workers", "whole number from 1"),
        ({"min_workers": 5, "max_workers": 4}, "min_workers", "5 is more than max_workers=4"),
        ({"min_workers": 17}, "min_workers", "17 is more than the site's limit of 16"),
        ({"min_ps": 9}, "min_ps", "9 is more than the site's limit of 8"),
        ({"min_ps": 0}, "min_ps", "needs at least 1"),
        ({"max_ps": 0}, "max_ps", "expected a whole number from 1 to"),
        ({"max_ps": 1, "min_ps": 2}, "min_ps", "2 is more than max_ps=1"),
        ({"max_workers": 10**9}, "max_workers", "whole number from 1 to 10000"),
        ({"allowed_workers": [32]}, "allowed_workers", "none of 32 lies between 1 and 16 workers"),
        ({"allowed_workers": [0]}, "allowed_workers", "got 0"),
        ({"allowed_workers": "1,x"}, "allowed_workers", "got 'x'"),
        ({"allowed_workers": {"a": 1}}, "allowed_workers", "expected worker counts"),
        ({"architecture": "ring"}, "architecture", "expected one of allreduce, ps, got 'ring'"),
        ({"consistency": 3}, "consistency", "expected one of async, sync, got 3"),
        ({"durability": "yes"}, "durability", "expected one of durable, none, got 'yes'"),
        ({"durability": "durable", "max_ps": 1}, "durability", "need a second parameter server, and the job has 1"),
        ({"durability": "durable", "architecture": "allreduce"}, "durability", "allreduce has none"),
        ({"durability": "durable", "consistency": "async"}, "durability", "do not take their steps together"),
        ({"epoch": 3}, "epoch", "unknown key (did you mean epochs?)"),
        ({"zzz": 3}, "zzz", "unknown key"),
    ],
)
def test_a_bad_request_names_its_key_and_where_it_stands(given_keys: dict[str, object], key: str, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**given_keys)
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert str(caught.value).startswith(f"job.yaml: {key}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("missing", "given_key", "problem"),
    [
        ("epochs", "epoch", "missing (is 'epoch' meant?)"),
        ("model", "models", "missing (is 'models' meant?)"),
        ("worker", "workers", "missing (is 'workers' meant?)"),
        ("samples_per_epoch", "sample_per_epoch", "missing (or give steps_per_epoch)"),
        ("samples_per_epoch", "step_per_epochs", "missing (or give steps_per_epoch)"),
        ("epochs", "colour", "missing"),
    ],
)
def test_a_missing_key_says_which_given_one_may_be_meant(missing: str, given_key: str, problem: str) -> None:
    keys = {key: value for key, value in LEAST.items() if key != missing}
    with pytest.raises(RequestError) as caught:
        parse_request({**keys, given_key: 3}, rules=RULES)
    assert (caught.value.key, caught.value.problem) == (missing, problem)


def test_an_unknown_key_that_is_meant_for_a_missing_one_is_told_once() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"model": "resnet-50", "epoch": 3, "sample_per_epoch": 9, "worker": "cpu:1"}, rules=RULES)
    told = [(caught.value.key, caught.value.problem), *caught.value.others]
    assert [(key, problem.partition("; known are")[0]) for key, problem in told] == [
        ("samples_per_epoch", "missing (or give steps_per_epoch)"),
        ("epochs", "missing (is 'epoch' meant?)"),
        ("sample_per_epoch", "unknown key (did you mean samples_per_epoch?)"),
    ]


def test_a_key_that_means_something_else_is_not_taken_for_a_slip() -> None:
    with pytest.raises(RequestError, match=r"^worker: missing$"):
        parse_request({"model": "resnet-50", "epochs": 3, "samples_per_epoch": 9, "max_workers": 3}, rules=RULES)


def test_a_site_without_a_list_takes_any_model() -> None:
    request = parse_request({**LEAST, "model": "my own/net:2"}, rules=RequestRules())
    assert request.model == request.name == "my own/net:2"


def test_steps_may_stand_for_samples() -> None:
    request = parse(samples_per_epoch=None, steps_per_epoch=50)
    assert (request.samples_per_epoch, request.steps_per_epoch) == (None, 50.0)


def test_the_site_lowers_upper_bounds() -> None:
    request = parse(max_workers=100, max_ps=100)
    assert (request.max_workers, request.max_ps) == (16, 8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("powers-of-two", (1, 2, 4, 8)),
        ([4, 1, 4], (1, 4)),
        (" 1, 2 ,8", (1, 2, 8)),
        (3, (3,)),
        ((2, 6), (2, 6)),
    ],
)
def test_allowed_counts(value: object, expected: tuple[int, ...]) -> None:
    request = parse(allowed_workers=value, max_workers=12)
    assert request.allowed_workers == expected
    assert [count for count in range(20) if request.allows(count)] == list(expected)


@pytest.mark.parametrize("most", range(1, 17))
def test_powers_of_two_go_up_to_the_bound(most: int) -> None:
    powers = parse(allowed_workers="powers-of-two", max_workers=most).allowed_workers
    assert powers == tuple(count for count in (1, 2, 4, 8, 16) if count <= most)


def test_allreduce_has_no_servers() -> None:
    request = parse(architecture="allreduce", ps="cpu:4", max_ps=5)
    assert (request.min_ps, request.max_ps, request.ps) == (0, 0, Resources())
    with pytest.raises(RequestError, match="ps: 'x' is not name:amount"):
        parse(architecture="allreduce", ps="x")


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.lists(st.integers())
KEYS = st.sampled_from(
    [
        *("model", "epochs", "samples_per_epoch", "steps_per_epoch", "batch", "worker", "ps", "min_workers", "name"),
        *("max_workers", "min_ps", "max_ps", "allowed_workers", "architecture", "consistency", "other"),
    ]
)


@given(st.dictionaries(KEYS, JUNK, max_size=4))
def test_whatever_is_asked_gives_a_sound_request_or_a_named_error(given_keys: dict[str, object]) -> None:
    try:
        request = parse(**given_keys)
    except RequestError as error:
        assert error.key.split(".")[0] in {*LEAST, *given_keys}  # noqa: PT017  both outcomes are right
        return
    assert 0 < request.epochs <= MAX_EPOCHS
    assert 1 <= request.min_workers <= request.max_workers <= RULES.max_workers
    assert request.min_ps <= request.max_ps <= RULES.max_ps
    assert request.allows(request.largest_allowed(RULES.max_workers))
    assert request.worker.thousandths
    assert (request.min_ps >= 1) == (request.architecture is Architecture.PS)


# #DL2 lines


def test_directives_are_found_anywhere_and_read_like_the_shell_reads_words() -> None:
    script = """#!/bin/bash
#SBATCH --nodes=1
#DL2 model=resnet-50 epochs=90
  #DL2\tname="my job"   min-workers=2
echo hello  # not one: #DL2 x=1
#DL2model=ignored
## DL2 y=1
#DL2 allowed_workers='1, 2' note=a"b c"d
"""
    assert read_directives(script) == {
        "model": "resnet-50",
        "epochs": "90",
        "name": "my job",
        "min_workers": "2",
        "allowed_workers": "1, 2",
        "note": "ab cd",
    }


def test_lines_are_those_of_a_shell() -> None:
    """A form feed does not end a comment."""
    assert read_directives("# old:\f#DL2 model=vgg-16\r\n#DL2\tmodel=resnet-50\tepochs=1\r\n") == {
        "model": "resnet-50",
        "epochs": "1",
    }
    with pytest.raises(RequestError) as caught:
        read_directives("#!/bin/sh\n#\f#\n#DL2 epochs=1\n\n  #DL2 epochs\n")
    assert caught.value.where == "script, line 5"


def test_a_quote_of_the_other_kind_is_kept() -> None:
    assert read_directives("""#DL2 a="it's" b='say "x"'""") == {"a": "it's", "b": 'say "x"'}


@pytest.mark.parametrize(
    ("line", "key", "problem"),
    [
        ("#DL2", "#DL2", "the line has no key=value"),
        pytest.param(f"#DL2 model={'x' * 20_000}", "#DL2", "the lines are longer than 16384 characters", id="long"),
        ("#DL2   ", "#DL2", "the line has no key=value"),
        ("#DL2 epochs", "#DL2", "'epochs' is not key=value"),
        ("#DL2 epochs 90", "#DL2", "'epochs' is not key=value"),
        ("#DL2 =90", "#DL2", "'=90' is not key=value"),
        ("#DL2 epochs=", "epochs", "has no value"),
        ('#DL2 epochs=""', "epochs", "has no value"),
        ('#DL2 name="my job', "#DL2", "a quote is not closed"),
        ("#DL2 name=it's", "#DL2", "a quote is not closed"),
        ("#DL2 epochs=1 epochs=2", "epochs", "is given twice"),
        ("#DL2 min-workers=1 min_workers=2", "min_workers", "is given twice"),
    ],
)
def test_a_malformed_line_is_named(line: str, key: str, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_directives(f"#!/bin/sh\n\n{line}\n", where="train.sh")
    assert caught.value.key == key
    assert problem in caught.value.problem
    assert caught.value.where == "train.sh, line 3"


WORDS = st.text("abcXYZ019.:,/-_ \t=#$\\", min_size=1, max_size=12)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), WORDS, min_size=1, max_size=5))
def test_quoted_values_come_through_whole(pairs: dict[str, str]) -> None:
    line = " ".join(f'{key}="{value}"' for key, value in pairs.items())
    assert read_directives(f"#DL2 {line}") == pairs
    plain = {key: value for key, value in pairs.items() if not set(value) & set(" \t\\$#")}
    if plain:
        line = " ".join(f"{key}={value}" for key, value in plain.items())
        assert read_directives(f"#DL2 {line}") == plain == dict(word.split("=", 1) for word in shlex.split(line))


@given(st.text("#DL2 =\"'ab\n\t-", max_size=60))
def test_no_script_breaks_the_reader(script: str) -> None:
    try:
        found = read_directives(script)
    except RequestError as error:
        assert error.where.startswith("script, line ")  # noqa: PT017  both outcomes are right
        return
    assert all(key and value for key, value in found.items())


def test_directives_and_parser_fit_together() -> None:
    script = "#DL2 model=vgg-16 epochs=3 steps-per-epoch=10\n#DL2 worker=cpu:2,memory:4G max-workers=4\n"
    request = parse_request(read_directives(script), rules=RULES)
    assert request.worker == Resources.of(cpu=2, memory=4096)
    assert (request.epochs, request.steps_per_epoch, request.max_workers) == (3.0, 10.0, 4)
