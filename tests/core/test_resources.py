from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.errors import RequestError
from dl2d.core.resources import NO_RESOURCES, Resources, Shortfall, parse_resources

NAMES = st.sampled_from(["cpu", "gpu", "memory", "gres/shard", "fpga"])
AMOUNTS = st.integers(min_value=0, max_value=10**9).map(lambda thousandths: thousandths / 1000)
VECTORS = st.dictionaries(NAMES, AMOUNTS).map(Resources.of)


@given(st.dictionaries(NAMES, AMOUNTS))
def test_equal_amounts_are_equal_whatever_their_order_and_zeros(amounts: dict[str, float]) -> None:
    vector = Resources.of(amounts)
    turned = Resources.of({"extra": 0, **dict(reversed(amounts.items()))})
    assert vector == turned
    assert hash(vector) == hash(turned)
    assert vector.as_dict() == {name: amounts[name] for name in sorted(amounts) if amounts[name]}
    assert all(vector.get(name) == amount for name, amount in amounts.items())
    assert vector.get("nothing-of-it") == 0


@given(st.lists(VECTORS, max_size=6), st.randoms())
def test_sums_are_exact_in_any_order(parts: list[Resources], random: object) -> None:
    total = Resources.total(parts)
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Resources.total(shuffled) == total
    one_by_one = NO_RESOURCES
    for part in shuffled:
        one_by_one += part
    assert one_by_one == total
    for name in ("cpu", "gpu", "memory"):
        exact = sum((Fraction(dict(part.thousandths).get(name, 0), 1000) for part in parts), Fraction())
        assert Fraction(dict(total.thousandths).get(name, 0), 1000) == exact


def test_tenths_of_a_gpu_add_up() -> None:
    assert Resources.total([Resources.of(gpu=0.1)] * 10) == Resources.of(gpu=1)


@given(VECTORS, st.integers(min_value=0, max_value=50))
def test_times_is_repeated_addition(vector: Resources, times: int) -> None:
    assert vector * times == Resources.total([vector] * times)


@given(VECTORS, VECTORS)
def test_minus_undoes_plus_and_never_goes_below_zero(one: Resources, other: Resources) -> None:
    assert (one + other).minus(other) == one
    rest = one.minus(other)
    assert all(amount > 0 for _, amount in rest.thousandths)
    assert rest.fits_in(one)
    assert one.fits_in(rest + other)


@given(VECTORS, VECTORS)
def test_a_demand_fits_exactly_where_nothing_falls_short(demand: Resources, room: Resources) -> None:
    missing = demand.shortfalls(room)
    assert demand.fits_in(room) == (missing == ())
    for short in missing:
        assert short == Shortfall(short.resource, demand.get(short.resource), room.get(short.resource))
        assert short.had < short.wanted
    assert demand.fits_in(demand + room)
    assert NO_RESOURCES.fits_in(room)


@given(VECTORS, VECTORS)
def test_the_dominant_share_is_the_largest_of_the_shares(demand: Resources, capacity: Resources) -> None:
    share, which = demand.dominant_share(capacity)
    shares = {
        name: demand.get(name) / capacity.get(name) if capacity.get(name) else math.inf for name in demand.as_dict()
    }
    assert share == pytest.approx(max(shares.values(), default=0.0))
    assert which == "" if not shares else shares[which] == pytest.approx(share)


@pytest.mark.parametrize(
    ("demand", "share", "which"),
    [
        # Ghodsi et al. 2011, section 4: 9 CPU and 18 GB; tasks <1 CPU, 4 GB> and <3 CPU, 1 GB>.
        (Resources.of(cpu=1, memory=4), 2 / 9, "memory"),
        (Resources.of(cpu=3, memory=1), 1 / 3, "cpu"),
        (NO_RESOURCES, 0.0, ""),
        (Resources.of(cpu=1, gpu=0.001), math.inf, "gpu"),
    ],
)
def test_dominant_shares_of_the_paper(demand: Resources, share: float, which: str) -> None:
    assert demand.dominant_share(Resources.of(cpu=9, memory=18)) == (pytest.approx(share), which)


@pytest.mark.parametrize(
    ("amounts", "message"),
    [
        ({"CPU": 1}, "'CPU' is not a resource name"),
        ({"": 1}, "'' is not a resource name"),
        ({"a b": 1}, "'a b' is not a resource name"),
        ({"cpu\n": 1}, "is not a resource name"),
        ({"x" * 65: 1}, "is not a resource name"),
        ({"cpu": -1}, "cpu: an amount must be a finite number"),
        ({"cpu": math.nan}, "cpu: an amount must be a finite number"),
        ({"cpu": math.inf}, "cpu: an amount must be a finite number"),
        ({"cpu": 1e13}, "cpu: an amount must be a finite number"),
        ({"cpu": True}, "cpu: an amount must be a finite number"),
        ({"gpu": 0.0004}, "gpu: 0.0004 is too small; amounts are counted in thousandths"),
    ],
)
def test_amounts_that_mean_nothing_are_refused(amounts: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resources.of(amounts)


def test_a_vector_and_a_shortfall_read_well() -> None:
    assert str(Resources.of(gpu=0.5, cpu=2)) == "cpu=2 gpu=0.5"
    assert str(NO_RESOURCES) == "nothing"
    assert str(Shortfall("cpu", 3.0, 0.5)) == "cpu: wanted 3, had 0.5"
    assert [type(value) for value in Resources.of(cpu=2, gpu=0.5).as_dict().values()] == [int, float]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu:2,gpu:1", Resources.of(cpu=2, gpu=1)),
        (" cpu : 2 , gpu:0.5", Resources.of(cpu=2, gpu=0.5)),
        ("cpu:1,gpu:a100:2", Resources.of({"cpu": 1, "gpu:a100": 2})),
        ("memory:4G", Resources.of(memory=4096)),
        ("memory:512", Resources.of(memory=512)),
        ("memory:1.5GiB", Resources.of(memory=1536)),
        ("memory:2t", Resources.of(memory=2 * 1024**2)),
        ("memory:512 K", Resources.of(memory=0.5)),
        ({"cpu": "2", "memory": "1G"}, Resources.of(cpu=2, memory=1024)),
        ({"cpu": 2, "gpu": 0}, Resources.of(cpu=2)),
        ({}, NO_RESOURCES),
    ],
)
def test_demands_are_read_as_users_write_them(text: object, expected: Resources) -> None:
    assert parse_resources(text, "worker") == expected


@pytest.mark.parametrize(
    ("value", "key", "problem"),
    [
        ("cpu", "worker", "'cpu' is not name:amount"),
        ("", "worker", "'' is not name:amount"),
        ("cpu:1,", "worker", "'' is not name:amount"),
        ("cpu:1,cpu:2", "worker", "cpu is given twice"),
        ("cpu:two", "worker.cpu", "expected a number, got 'two'"),
        ("cpu:4G", "worker.cpu", "expected a number, got '4G'"),
        ("memory:4X", "worker.memory", "expected a number, got '4X'"),
        ("cpu:", "worker.cpu", "expected a number, got ''"),
        ("cpu:nan", "worker", "cpu: an amount must be a finite number"),
        ("cpu:1e999", "worker", "cpu: an amount must be a finite number"),
        ("cpu:-1", "worker", "cpu: an amount must be a finite number"),
        ({"cpu": 10**400}, "worker", "cpu: an amount must be a finite number"),
        ({"cpu": -(10**400)}, "worker", "cpu: an amount must be a finite number"),
        ({"cpu": True}, "worker.cpu", "expected a number, got True"),
        ({"cpu": None}, "worker.cpu", "expected a number, got 'None'"),
        ({1: 2}, "worker", "'1' is not a resource name"),
        (3, "worker", "expected resources such as"),
        (None, "worker", "expected resources such as"),
        (["cpu:1"], "worker", "expected resources such as"),
    ],
)
def test_a_bad_demand_names_the_part_at_fault(value: object, key: str, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_resources(value, "worker")
    assert caught.value.key == key
    assert problem in caught.value.problem


@given(VECTORS)
def test_what_is_written_as_text_is_read_back(vector: Resources) -> None:
    amounts = vector.as_dict()
    if amounts:
        assert parse_resources(",".join(f"{name}:{amount}" for name, amount in amounts.items()), "worker") == vector
    assert parse_resources(amounts, "worker") == vector


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(JUNK | st.dictionaries(NAMES, JUNK) | st.lists(st.text(":,.0123456789GMcpugmeory"), max_size=3).map(",".join))
def test_whatever_a_user_writes_gives_a_vector_or_a_named_error(value: object) -> None:
    try:
        parse_resources(value, "worker")
    except RequestError as error:
        assert error.key.startswith("worker")  # noqa: PT017  both outcomes are right
