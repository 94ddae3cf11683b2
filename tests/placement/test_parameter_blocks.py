from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl2d.placement.parameter_blocks import MXNET_BOUND, Assignment, mxnet, optimus


def vgg16() -> list[int]:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6]
    convolutions = [size for before, after in pairwise(widths) for size in (9 * before * after, after)]
    dense = [size for before, after in pairwise([25088, 4096, 4096, 1000]) for size in (before * after, after)]
    return convolutions + dense


def resnet50() -> list[int]:
    sizes, before = [3 * 64 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            for inputs, outputs, kernel in ((before, width, 1), (width, width, 9), (width, 4 * width, 1)):
                sizes += [inputs * outputs * kernel, outputs, outputs]
            if number == 0:
                sizes += [before * 4 * width, 4 * width, 4 * width]
            before = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def alexnet() -> list[int]:
    convolutions = [(3, 96, 121), (96, 256, 25), (256, 384, 9), (384, 384, 9), (384, 256, 9)]
    layers = [*convolutions, (9216, 4096, 1), (4096, 4096, 1), (4096, 1000, 1)]
    return [size for before, after, kernel in layers for size in (before * after * kernel, after)]


def test_the_models_are_those_of_their_papers() -> None:
    assert [sum(vgg16()), sum(resnet50()), sum(alexnet())] == [138_357_544, 25_557_032, 62_378_344]


@pytest.mark.parametrize(
    ("sizes", "servers", "expected"),
    [
        pytest.param([6, 3, 3], 2, [[(0, 6)], [(1, 3), (2, 3)]], id="what fits best"),
        pytest.param([2, 5, 3], 2, [[(1, 5)], [(0, 2), (2, 3)]], id="the largest first"),
        pytest.param([3, 3, 3], 2, [[(0, 3), (2, 3)], [(1, 3)]], id="fits nowhere: the emptiest"),
        pytest.param(
            [10, 2], 3, [[(0, 4)], [(0, 4)], [(0, 2), (1, 2)]], id="larger than a share: cut, the rest as any other"
        ),
        pytest.param([12], 3, [[(0, 4)]] * 3, id="one block for all"),
        pytest.param([10, 10], 4, [[(0, 5)], [(0, 5)], [(1, 5)], [(1, 5)]], id="nothing is cut off where none is left"),
        pytest.param(
            [200, 50, 50, 50, 50, 1], 2, [[(0, 200), (5, 1)], [(1, 50), (2, 50), (3, 50), (4, 50)]],
            id="small: the fewest pieces",
        ),
        pytest.param([7, 5], 1, [[(0, 7), (1, 5)]], id="one server"),
        pytest.param([1], 3, [[(0, 1)], [], []], id="more servers than parameters"),
        pytest.param([], 2, [[], []], id="nothing"),
    ],
)  # fmt: skip
def test_optimus_assigns_as_in_its_paper(sizes, servers, expected) -> None:
    assert [list(pieces) for pieces in optimus(sizes, servers).servers] == expected


def test_mxnet_cuts_what_is_large_and_spreads_the_rest_by_number() -> None:
    done = mxnet([10, 1_000_000, 999_999], 3)  # 2 x 9973 = 2 modulo 3
    assert done.servers == (((0, 10), (1, 333_333)), ((1, 333_333),), ((1, 333_334), (2, 999_999)))
    assert mxnet([5, 2], 3, bound=2).servers == (((0, 1),), ((0, 2), (1, 1)), ((0, 2), (1, 1)))


def test_imbalance_is_the_largest_over_the_mean() -> None:
    done = optimus([3, 3, 3], 2)
    assert (done.loads, done.requests) == ((6, 3), (2, 1))
    assert (done.load_imbalance, done.request_imbalance) == (6 / 4.5, 2 / 1.5)
    assert optimus([], 2).load_imbalance == optimus([], 2).request_imbalance == 1.0


@pytest.mark.parametrize("assign", [optimus, mxnet])
def test_nonsense_is_refused(assign) -> None:
    with pytest.raises(ValueError, match="servers: must be at least 1, not 0"):
        assign([1], 0)
    with pytest.raises(ValueError, match=r"sizes\[1\]: a block has at least one parameter, not 0"):
        assign([1, 0], 2)


_sizes = st.lists(st.one_of(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 2_000_000)), max_size=40)
_servers = st.integers(1, 12)


def holds_everything_once(done: Assignment, sizes: list[int], servers: int) -> None:
    assert len(done.servers) == servers
    total = Counter[int]()
    for pieces in done.servers:
        assert all(piece.size > 0 for piece in pieces)
        assert len({piece.block for piece in pieces}) == len(pieces)  # one request for a block and server
        for piece in pieces:
            total[piece.block] += piece.size
    assert total == dict(enumerate(sizes))


@given(_sizes, _servers)
def test_every_parameter_is_on_one_server_in_pieces_that_are_not_empty(sizes, servers) -> None:
    holds_everything_once(optimus(sizes, servers), sizes, servers)
    holds_everything_once(mxnet(sizes, servers), sizes, servers)
    holds_everything_once(mxnet(sizes, servers, bound=1), sizes, servers)


@given(_sizes.filter(bool), _servers)
def test_no_server_has_more_than_two_shares_but_for_small_blocks(sizes, servers) -> None:
    large = [size for size in sizes if size * servers * 100 > sum(sizes)]
    share = -(-sum(large) // servers)
    if all(size * servers * 100 > sum(large) for size in large):
        assert max(optimus(large, servers).loads, default=0) <= 2 * share


@given(_sizes, _servers)
def test_only_what_is_larger_than_a_share_is_cut(sizes, servers) -> None:
    share = -(-sum(sizes) // servers)
    pieces = Counter(piece.block for held in optimus(sizes, servers).servers for piece in held)
    assert all(count == 1 for block, count in pieces.items() if sizes[block] <= share)


@pytest.mark.parametrize("model", [vgg16, resnet50, alexnet])
def test_for_real_models_optimus_is_the_evener(model) -> None:
    """At most 15 % above the mean with up to 32 servers, where MXNet is up to 2.4 times it, and never more requests."""
    counts = range(1, 33)
    ours, theirs = [optimus(model(), count) for count in counts], [mxnet(model(), count) for count in counts]
    assert max(done.load_imbalance for done in ours) < 1.15
    assert max(done.load_imbalance for done in ours) < max(done.load_imbalance for done in theirs)
    assert sum(done.load_imbalance for done in ours) < sum(done.load_imbalance for done in theirs)
    assert all(max(own.requests) <= max(other.requests) for own, other in zip(ours, theirs, strict=True))
    assert MXNET_BOUND == 1_000_000
