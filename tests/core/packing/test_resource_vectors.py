from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dl2d.core.cluster import NodeSet
from dl2d.core.jobs import JobKey
from dl2d.core.packing.node_classes import EVERY_NODE
from dl2d.core.packing.resource_vectors import ResourceVectors
from dl2d.core.resources import Resources

ANY, FIRST, SECOND = (JobKey("c", str(number), number) for number in range(3))
SETS = (NodeSet((FIRST,), frozenset({"a", "b"}), "a reason"), NodeSet((SECOND,), frozenset({"b"}), "another"))
LISTED = [Resources.of(gpu=2, cpu=4), Resources.of(cpu=1, memory=8)]
VECTORS = ResourceVectors(LISTED, SETS)

listed = st.builds(lambda cpu, memory: Resources.of(cpu=cpu / 4, memory=memory), st.integers(0, 9), st.integers(0, 9))


def test_a_demand_has_the_amounts_of_all_resources_and_the_number_of_its_jobs_set() -> None:
    asked = Resources.of(cpu=1, gpu=0.5)
    assert VECTORS.sizes == (3, 2)
    assert VECTORS.demand(asked) == VECTORS.demand(asked, ANY) == (1000, 500, 0, EVERY_NODE)
    assert VECTORS.demand(asked, FIRST) == (1000, 500, 0, 0)
    assert VECTORS.demand(asked, SECOND) == (1000, 500, 0, 1)
    assert [VECTORS.node_set(job) for job in (None, ANY, FIRST, SECOND)] == [EVERY_NODE, EVERY_NODE, 0, 1]


def test_of_a_resource_that_is_not_listed_there_is_no_demand_and_no_amount() -> None:
    asked = Resources.of(cpu=1, fpga=1)
    assert VECTORS.demand(asked) is None
    assert VECTORS.amounts(asked) == (1000, 0, 0)


def test_sets_of_nodes_are_bit_masks_and_have_words() -> None:
    assert VECTORS.member_of() == {"a": 1, "b": 3}
    assert VECTORS.may_use(EVERY_NODE, 5) == ""
    assert VECTORS.may_use(1, 5) == SETS[1].text(5)


@given(st.lists(listed, min_size=1, max_size=4), st.sampled_from([ANY, FIRST, SECOND]))
def test_what_is_asked_for_together_is_the_sum(demands, job) -> None:
    vectors = ResourceVectors(demands, SETS)
    found = [vectors.demand(demand, job) for demand in demands]
    together = vectors.together(*[vector for vector in found if vector is not None])
    assert together == vectors.demand(Resources.total(demands), job)
    assert vectors.resources(together[:-1]) == Resources.total(demands)
