"""How the lists of applications and nodes and a service's description are read; nothing broken gets through."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarn.rm_answers import activities, amounts, app, client_of, client_of_lists, lists, node, queue, scheduler, service
from yarn.spoiled_answers import spoiled

from dl2d.core.cluster import NodeState
from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.resource_manager import RmJobState
from dl2d.core.resources import Resources
from dl2d_yarn.cluster_listing import read_listing, read_service, read_version
from dl2d_yarn.queue_and_growth_limits import read_pending_reason, read_queues
from dl2d_yarn.yarn_states import ServiceUse


def test_an_idle_cluster() -> None:
    listing = read_listing(client_of_lists(lists()))
    assert (listing.applications, listing.nodes, listing.remarks) == ((), (), ())


def test_applications_and_nodes() -> None:
    apps = [app(1), app(2, "FINISHED", "FAILED", diagnostics="coordinator-0\n failed"), app(3, "ACCEPTED")]
    listing = read_listing(client_of_lists(lists(apps, [node(1, used=(1024, 3, 1)), node(2, "UNHEALTHY")])))
    assert [(each.state, each.reason) for each in listing.applications] == [
        (RmJobState.RUNNING, ""),
        (RmJobState.FAILED, "coordinator-0 failed"),
        (RmJobState.PENDING, ""),
    ]
    assert listing.applications[0].started == 1795581713
    first, second = listing.nodes
    assert (first.name, first.capacity) == ("node1", Resources.of(cpu=8, gpu=2, memory=4096))
    assert first.used == Resources.of(cpu=3, gpu=1, memory=1024)
    assert (second.state, second.remark) == (NodeState.DRAINING, "UNHEALTHY: fails its health check")
    assert listing.node_names["node1:45001"] == "node1"


def test_a_node_has_its_whole_capacity_while_yarn_recovers_the_containers_on_it() -> None:
    # What is used was read before a container of 4 CPU was recovered, what is available after it.
    torn = node(1, used=(1024, 3, 1)) | {"availableResource": amounts(1024, 1, 1), "totalResource": amounts(4096, 8, 2)}
    (listed,) = read_listing(client_of_lists(lists([], [torn]))).nodes
    assert listed.capacity == Resources.of(cpu=8, gpu=2, memory=4096)
    # Its capacity was reduced to less than its containers have.
    (listed,) = read_listing(client_of_lists(lists([], [torn | {"totalResource": amounts(512, 8, 2)}]))).nodes
    assert listed.capacity == Resources.of(cpu=8, gpu=2, memory=1024)


def test_several_node_managers_of_a_host_are_several_nodes_and_a_restarted_one_is_one() -> None:
    nodes = [node(1, host="a"), node(2, host="a"), node(3, "LOST", host="b"), node(4, host="b")]
    listing = read_listing(client_of_lists(lists([], nodes)))
    assert {each.name: each.state for each in listing.nodes} == {
        "a:45001": NodeState.UP,
        "a:45002": NodeState.UP,
        "b": NodeState.UP,
    }


def test_only_nodes_of_the_partition_are_there() -> None:
    labelled = {**node(1), "nodeLabels": ["gpu"]}
    client = client_of_lists(lists([], [labelled, node(2), {**node(3), "nodeLabels": [""]}]))
    assert [each.name for each in read_listing(client).nodes] == ["node2", "node3"]
    assert [each.name for each in read_listing(client, "gpu").nodes] == ["node1"]


def test_only_nodes_with_all_of_the_attributes_are_there() -> None:
    def having(number: int, *values: str) -> dict[str, Any]:
        given = [{"prefix": "nm.yarn.io", "name": "gpu", "type": "STRING", "value": value} for value in values]
        return {**node(number), "nodeAttributesInfo": {"nodeAttributeInfo": given}}

    client = client_of_lists(lists([], [having(1, "a100"), having(2, "t4"), having(3), node(4)]))
    assert [each.name for each in read_listing(client, attributes=["nm.yarn.io/gpu=a100"]).nodes] == ["node1"]
    assert len(read_listing(client).nodes) == 4
    assert read_listing(client, attributes=["nm.yarn.io/gpu=a100", "nm.yarn.io/gpu=t4"]).nodes == ()


def test_unknown_states_and_units_are_reported() -> None:
    strange = node(1, "QUIESCED")
    strange["usedResource"]["resourceInformations"]["resourceInformation"].append(
        {"name": "yarn.io/fpga", "value": 1, "units": "dozen"}
    )
    listing = read_listing(client_of_lists(lists([app(1, "HIBERNATING")], [strange])))
    assert listing.nodes[0].state is NodeState.DRAINING
    assert not listing.applications[0].state.ended
    assert len(listing.remarks) == 3
    assert "'HIBERNATING'" in listing.remarks[0]


def test_a_service() -> None:
    client = client_of(lambda _request: httpx2.Response(200, content=json.dumps(service(worker=2, ps=1))))
    read = read_service(client, "dl2-1-1795581700")
    sizes = {name: component.size for name, component in read.components.items()}
    assert (read.use, sizes) == (ServiceUse.RESIZABLE, {"worker": 2, "ps": 1})
    container = "container_1795581702976_0001_01_%06d"
    containers = {name: component.containers for name, component in read.components.items()}
    assert containers == {"worker": {0: container % 2, 1: container % 3}, "ps": {0: container % 4}}


def test_secrets_of_a_service_are_not_in_what_is_logged_of_it() -> None:
    configuration = {"env": {"DL2_PROOF": "hunter2"}, "properties": {"dl2.key": "hunter3"}}
    answer = json.dumps({**service(), "configuration": configuration})
    read = read_service(client_of(lambda _request: httpx2.Response(200, content=answer)), "s")
    assert read.environment == {"DL2_PROOF": "hunter2"}
    assert "hunter" not in repr(read)


def test_a_service_in_an_unknown_state_is_unavailable() -> None:
    client = client_of(lambda _request: httpx2.Response(200, content=json.dumps(service("DREAMING"))))
    with pytest.raises(Unavailable, match="DREAMING"):
        read_service(client, "s")


def test_a_service_of_which_a_component_lists_no_containers_is_unavailable() -> None:
    """Else tasks that have not reported for some time would count as lost."""
    answer = service(worker=2, ps=1)
    del answer["components"][0]["containers"]
    client = client_of(lambda _request: httpx2.Response(200, content=json.dumps(answer)))
    with pytest.raises(Unavailable, match="which containers component worker has"):
        read_service(client, "s")


def test_the_version() -> None:
    assert read_version(client_of_lists(lists())) == "3.4.2"


GOOD = lists([app(1), app(2, "FINISHED", "SUCCEEDED")], [node(1), node(2, "LOST")])
BODIES = {path: json.dumps(answer).encode() for path, answer in GOOD.items()}


@given(path=st.sampled_from(sorted(GOOD)[:1] + sorted(GOOD)[2:]), data=st.data())
def test_a_spoiled_list_is_read_in_full_or_incomplete_or_not_at_all(path: str, data: st.DataObject) -> None:
    broken = data.draw(spoiled(GOOD[path]))
    try:
        listing = read_listing(client_of_lists({**GOOD, path: broken}))
    except ResourceManagerError:
        return
    if listing.incomplete:
        return
    kept = broken.get(path.rpartition("/")[2])
    entries = next(iter(kept.values())) if kept else []
    read = listing.applications if path.endswith("apps") else listing.node_names
    if path.endswith("nodes"):
        assert len(read) == len({entry["id"] for entry in entries})
    else:
        assert [each.id for each in read] == [entry["id"] for entry in entries]


@given(path=st.sampled_from(["/ws/v1/cluster/apps", "/ws/v1/cluster/nodes"]), data=st.data())
def test_truncated_lists_and_noise_are_incomplete(path: str, data: st.DataObject) -> None:
    whole = BODIES[path]
    cut = data.draw(st.integers(0, len(whole) - 1).map(lambda size: whole[:size]) | st.binary(max_size=50))

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=cut if request.url.path == path else BODIES[request.url.path])

    with pytest.raises(Unavailable):
        read_listing(client_of(answer))


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"apps":' * 50_000, b"<html>", b"\xff\xfe", b"null", b"0", b'"x"'])
def test_nonsense_is_unavailable(body: bytes) -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        read_listing(client_of(lambda _request: httpx2.Response(200, content=body)))


@given(data=st.data())
def test_a_spoiled_service_never_raises_anything_else(data: st.DataObject) -> None:
    broken = json.dumps(data.draw(spoiled(service(coordinator=1, worker=2, ps=1))))
    try:
        read_service(client_of(lambda _request: httpx2.Response(200, content=broken)), "s")
    except ResourceManagerError:
        pass


@given(data=st.data())
def test_spoiled_queues_never_raise_anything_else(data: st.DataObject) -> None:
    whole = scheduler(queue("default", (8192, 16, 4), (1024, 2, 0), pending=(512, 1, 0)))
    broken = json.dumps(data.draw(spoiled(whole)))
    client = client_of(lambda _request: httpx2.Response(200, content=broken))
    try:
        queues = read_queues(client)
    except ResourceManagerError:
        return
    headroom = queues.headroom("default", "dl2d") if queues is not None else None
    if headroom is not None:
        assert all(amount >= 0 for amount in headroom.values())


@given(data=st.data())
def test_a_spoiled_reason_to_wait_is_short_text_or_none(data: st.DataObject) -> None:
    broken = json.dumps(data.draw(spoiled(activities("no room", "Queue does not have enough headroom"))))
    try:
        reason = read_pending_reason(client_of(lambda _request: httpx2.Response(200, content=broken)), "a")
    except ResourceManagerError:
        return
    assert "\n" not in reason
    assert len(reason) <= 300


def test_a_large_cluster_is_read_in_two_calls() -> None:
    answers = lists([app(number) for number in range(1000)], [node(number) for number in range(4000)])
    bodies = {path: json.dumps(answer).encode() for path, answer in answers.items()}
    calls = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append(request.url.path)
        return httpx2.Response(200, content=bodies[request.url.path])

    listing = read_listing(client_of(answer))
    assert (len(listing.applications), len(listing.nodes), len(calls)) == (1000, 4000, 2)
