"""Reads the ResourceManager's lists of applications and nodes, and the description of one service.

``NodeSizes`` says which demands the nodes of a listing can meet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec

from dl2d.core.cluster import Node, NodeState
from dl2d.core.errors import Unavailable
from dl2d.core.jobs import Role
from dl2d.core.resource_manager import RmJobState
from dl2d.core.resources import NO_RESOURCES, Resources, too_small_everywhere
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.service_description import SERVICE_NAME
from dl2d_yarn.yarn_states import (
    COMPONENT_STATES,
    CONTAINER_STATES,
    CONTAINERS_LOST,
    SERVICE_STATES,
    ServiceUse,
    application_state,
    node_state,
    with_exit_status,
)

V = TypeVar("V")

SERVICE_TYPE = "yarn-service"
APPS_PATH = "/ws/v1/cluster/apps"
NODES_PATH = "/ws/v1/cluster/nodes"
SERVICES_PATH = "/app/v1/services"
#: Minimum time between two listings that are read to look up an application, seconds.
LOOK_UP_SECONDS = 3.0
#: Sections of an application that the list is asked to leave out; they are nine tenths of the answer.
_DESELECTED = "resourceRequests,timeouts,appNodeLabelExpression,amNodeLabelExpression"
#: Name of a container in its component: ``worker-3``.
_INSTANCE = re.compile(r"[a-z0-9-]+-([0-9]{1,6})")
_RESOURCE = re.compile(r"[a-z][a-z0-9_.:/-]{0,63}")
#: dl2d's names of resources, by YARN's.
_DL2D_NAMES = {"memory-mb": "memory", "vcores": "cpu", "yarn.io/gpu": "gpu"}
#: Units of ``UnitsConversionUtil``, as multiples of 1.
_UNITS = {
    "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
_MAX_AMOUNT = 1e12


class _PartitionUse(msgspec.Struct, rename="camel"):
    used: Vector | None = None
    #: Of the ApplicationMaster.
    am_used: Vector | None = None


class _ResourceInfo(msgspec.Struct, rename="camel"):
    resource_usages_by_partition: list[_PartitionUse] = []


class _App(msgspec.Struct, rename="camel"):
    id: str
    user: str
    name: str
    state: str
    final_status: str
    started_time: int
    launch_time: int = 0
    diagnostics: str = ""
    application_type: str = ""
    queue: str = ""
    application_tags: str = ""
    running_containers: int = 0
    finished_time: int = 0
    resource_info: _ResourceInfo | None = None


class _Apps(msgspec.Struct):
    #: The applications under the key ``app``; no key at all where there are none.
    apps: dict[Literal["app"], list[msgspec.Raw]] | None


class Amount(msgspec.Struct):
    """Amount of one resource."""

    name: str
    value: int
    units: str = ""


class _Amounts(msgspec.Struct, rename="camel"):
    resource_information: list[Amount]


class Vector(msgspec.Struct, rename="camel"):
    """Amounts of resources as YARN writes them."""

    resource_informations: _Amounts


class _Attribute(msgspec.Struct):
    prefix: str
    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.prefix}/{self.name}={self.value}"


class _Attributes(msgspec.Struct, rename="camel"):
    node_attribute_info: list[_Attribute] = []


class _Node(msgspec.Struct, rename="camel"):
    id: str
    state: str
    node_host_name: str
    #: Absent on nodes that are lost.
    used_resource: Vector | None = None
    available_resource: Vector | None = None
    #: Not before Hadoop 3.4.
    total_resource: Vector | None = None
    health_report: str = ""
    node_labels: list[str] | None = None
    node_attributes_info: _Attributes | None = None

    def is_selected(self, partition: str, attributes: Collection[str]) -> bool:
        """Whether it is in a partition and has all of these attributes, as settings have them."""
        has = map(str, self.node_attributes_info.node_attribute_info) if self.node_attributes_info else ()
        return (self.node_labels or [""])[0] == partition and set(attributes) <= set(has)


class _Nodes(msgspec.Struct):
    #: The nodes under the key ``node``; no key at all where there are none.
    nodes: dict[Literal["node"], list[msgspec.Raw]] | None


class _Container(msgspec.Struct):
    id: str
    state: str
    component_instance_name: str = ""


class _Additional(msgspec.Struct):
    value: int


class _Demand(msgspec.Struct):
    cpus: int = 1
    memory: str = "0"
    additional: dict[str, _Additional] | None = None


class _Component(msgspec.Struct):
    name: str
    resource: _Demand = msgspec.field(default_factory=_Demand)
    number_of_containers: int = 0
    decommissioned_instances: list[str] = []
    state: str = "FLEXING"
    #: None where YARN does not say, which is not the same as none.
    containers: list[_Container] | None = None


class _ServiceConfiguration(msgspec.Struct):
    properties: dict[str, str] = {}
    env: dict[str, str] = {}


class _Service(msgspec.Struct):
    state: str
    id: str = ""
    components: list[_Component] = []
    configuration: _ServiceConfiguration = msgspec.field(default_factory=_ServiceConfiguration)


class _ClusterInfo(msgspec.Struct, rename="camel"):
    hadoop_version: str


class _ClusterInfoAnswer(msgspec.Struct, rename="camel"):
    cluster_info: _ClusterInfo


@dataclass(frozen=True, slots=True)
class Application:
    """An application as the list of applications has it."""

    id: str
    name: str
    user: str
    state: RmJobState
    #: Why it waits, or how it ended.
    reason: str
    #: Times of submission and end, seconds since 1970; ``ended`` is 0 while it has not ended.
    started: int
    ended: float = 0.0
    type: str = SERVICE_TYPE
    queue: str = ""
    tags: str = ""
    #: Number of its containers, its ApplicationMaster's included.
    containers: int = 0
    #: Resources of all containers except its ApplicationMaster's; none where the list was read without them.
    used: Resources = NO_RESOURCES
    #: When its ApplicationMaster had a container first, seconds since 1970; 0 before.
    launched: float = 0.0

    @property
    def is_service(self) -> bool:
        """Whether it is a service. Any user may submit an application of this type, by whatever name."""
        return self.type == SERVICE_TYPE and SERVICE_NAME.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True)
class ClusterListing:
    """Applications and nodes of one moment."""

    applications: tuple[Application, ...]
    nodes: tuple[Node, ...]
    #: Name of each node by its id in YARN (``host:port``).
    node_names: Mapping[str, str]
    #: Ids of nodes whose containers count as lost in YARN.
    lost_nodes: frozenset[str] = frozenset()
    #: Messages for the log about values that were not understood.
    remarks: tuple[str, ...] = ()
    #: Records that could not be read: applications or nodes may be missing.
    incomplete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentDescription:
    """What YARN says of one component of a service."""

    #: Number of containers, as was asked for last.
    size: int = 0
    #: Ids of containers whose processes may run, by their positions.
    containers: Mapping[int, str] = field(default_factory=dict)
    #: Ids of containers that have ended, where there are no other ones.
    dead: tuple[str, ...] = ()
    #: Decommissioned positions.
    decommissioned: frozenset[int] = frozenset()
    #: Demand of a container, as directives have it.
    demand: str = ""


@dataclass(frozen=True, slots=True)
class ServiceDescription:
    """What YARN says of one service: its state, components and configuration."""

    use: ServiceUse
    components: Mapping[str, ComponentDescription]
    #: Id of its application.
    application_id: str = ""
    #: Properties and environment that all components have; secrets are among them.
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def component(self, role: Role) -> ComponentDescription:
        """The component of a role; an empty one where there is none."""
        return self.components.get(role.value, ComponentDescription())


def read_listing(
    client: RestClient, partition: str = "", *, attributes: Collection[str] = (), all_types: bool = False
) -> ClusterListing:
    """Ask for all services, and all nodes of a partition (node label) with some attributes: two calls in any case.

    With ``all_types`` for all applications, with their resources.

    Applications first: a container that starts between the calls then counts in its node's use already.

    Raises
    ------
    Unavailable
        An answer did not come or is cut off. Nothing may be concluded from what is missing.
    Denied
        The ResourceManager does not know or does not accept the daemon's user.
    """
    parameters = {"deSelects": _DESELECTED}
    if not all_types:
        parameters = {"applicationTypes": SERVICE_TYPE, "deSelects": f"{_DESELECTED},resourceInfo"}
    apps = client.get(APPS_PATH, _Apps, parameters=parameters)
    nodes = client.get(NODES_PATH, _Nodes)
    readable_apps, bad_apps = _decode_each(apps.apps["app"] if apps.apps else (), _App)
    readable_nodes, bad_nodes = _decode_each(nodes.nodes["node"] if nodes.nodes else (), _Node)
    applications, app_remarks = _applications(readable_apps)
    listed = [node for node in readable_nodes if node.is_selected(partition, attributes)]
    read_nodes, names, node_remarks = _nodes(listed)
    # A node that registers again may be listed twice: its containers are not lost.
    present = {node.id for node in listed if node.state not in CONTAINERS_LOST}
    lost = frozenset(node.id for node in listed) - present
    return ClusterListing(applications, read_nodes, names, lost, (*app_remarks, *node_remarks), (*bad_apps, *bad_nodes))


def _decode_each(records: Iterable[msgspec.Raw], kind: type[V]) -> tuple[list[V], list[str]]:
    """Decoded records, and an error message for each record that cannot be decoded."""
    read, bad = [], []
    for record in records:
        try:
            read.append(msgspec.json.decode(record, type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            bad.append(f"cannot read {bytes(record)[:200]!r} ({error})")
    return read, bad


def _applications(apps: Iterable[_App]) -> tuple[tuple[Application, ...], list[str]]:
    read, remarks = [], []
    for app in apps:
        state = application_state(app.state, app.final_status)
        if state is None:
            # It may hold resources, so nothing new is started in its place and it does not count as ended.
            remarks.append(f"{app.id}: unknown state {app.state[:60]!r} with final status {app.final_status[:60]!r}")
            state = RmJobState.RUNNING
        reason = "" if state is RmJobState.RUNNING else _reason(app.diagnostics)
        usages = app.resource_info.resource_usages_by_partition if app.resource_info else ()
        read.append(
            Application(
                app.id, app.name, app.user, state, reason, app.started_time // 1000, app.finished_time / 1000,
                app.application_type or SERVICE_TYPE, app.queue, app.application_tags, app.running_containers,
                Resources.total(read_vector(usage.used).minus(read_vector(usage.am_used)) for usage in usages),
                app.launch_time / 1000,
            )
        )  # fmt: skip
        if read[-1].type == SERVICE_TYPE and not read[-1].is_service:
            remarks.append(f"{app.id} is ignored: {app.name[:80]!r} cannot be the name of a YARN service")
    return tuple(read), remarks


def _reason(diagnostics: str) -> str:
    """Diagnostics in one line, without the leading time and the trailing amounts of the queue."""
    line = re.sub(r"^\[[^]]*\] ", "", " ".join(diagnostics.split()))
    return with_exit_status(line.partition(" Details :")[0].strip()[:1000])


def _nodes(nodes: Iterable[_Node]) -> tuple[tuple[Node, ...], dict[str, str], list[str]]:
    """Nodes, named by host or by ``host:port`` where a host has several; names by id; messages for the log."""
    present, remarks = [], []
    for node in nodes:
        state, remark, known = node_state(node.state, " ".join(node.health_report.split())[:200])
        if not known:
            remarks.append(f"{node.id}: unknown node state {node.state[:60]!r}; it gets no new tasks")
        present.append((node, state, remark))
    # After a restart on another port a node is listed twice: what is down does not count.
    hosts = Counter(node.node_host_name for node, state, _ in present if state is not NodeState.DOWN)
    read: dict[str, Node] = {}
    names = {}
    for node, state, remark in present:
        if state is not NodeState.DOWN and (node.used_resource is None or node.available_resource is None):
            raise Unavailable(f"{node.id}: in state {node.state} without resources; the list of nodes is incomplete")
        name = node.id if hosts[node.node_host_name] > 1 else node.node_host_name
        names[node.id] = name
        used, unreadable = _resources(node.used_resource)
        # YARN writes both amounts one after the other: while it recovers containers, their sum may be too small.
        total = read_vector(node.total_resource or node.available_resource)
        total = total.maximum(used) if node.total_resource is not None else total + used
        remarks.extend(f"{node.id}: {words}" for words in unreadable)
        if name not in read or read[name].state is NodeState.DOWN:
            read[name] = Node(name=name, capacity=total, used=used, state=state, remark=remark)
    return tuple(read.values()), names, remarks


def _resources(vector: Vector | None) -> tuple[Resources, list[str]]:
    """Amounts under dl2d's names, and a message for each amount that cannot be read."""
    amounts: dict[str, float] = {}
    unreadable = []
    for entry in vector.resource_informations.resource_information if vector else ():
        name = resource_name(entry)
        scale = _UNITS.get(entry.units)
        if scale is None or not _RESOURCE.fullmatch(name):
            unreadable.append(
                f"resource {entry.name[:80]!r} in unit {entry.units[:20]!r} is not counted: dl2d cannot use such a "
                "name or unit"
            )
            continue
        if name == "memory":
            scale /= _UNITS["Mi"]
        # After a reduction of its capacity a node has less than nothing available.
        amounts[name] = min(max(entry.value * scale, 0.0), _MAX_AMOUNT)
    return Resources.of({name: amount for name, amount in amounts.items() if amount >= 0.001}), unreadable


def resource_name(amount: Amount) -> str:
    """dl2d's name of a resource."""
    return _DL2D_NAMES.get(amount.name, amount.name.lower())


def read_vector(vector: Vector | None) -> Resources:
    """The amounts under dl2d's names; what is not understood is left out."""
    return _resources(vector)[0]


def service_path(name: str) -> str:
    """Path of a service in the Services interface, whatever characters its name has."""
    return f"{SERVICES_PATH}/{quote(name, safe='')}"


def read_service(client: RestClient, name: str, *, do_as: str = "") -> ServiceDescription:
    """Ask for the description of one service.

    Raises
    ------
    Unavailable
        There is no complete answer, or a state in it is unknown.
    NotFound
        There is no service of this name.
    """
    service = client.get(service_path(name), _Service, do_as=do_as)
    use = _meaning(SERVICE_STATES, service.state, f"service {name}")
    components = {}
    for component in service.components:
        runs = _meaning(COMPONENT_STATES, component.state, f"component {component.name} of {name}")
        if component.containers is None and use is ServiceUse.RESIZABLE:
            raise Unavailable(f"{name}: the answer does not say which containers component {component.name} has")
        containers = component.containers or []
        alive = {
            _position(container): container.id
            for container in containers
            if _meaning(CONTAINER_STATES, container.state, container.id) and runs
        }
        dead = () if alive else tuple(container.id for container in containers)
        components[component.name] = ComponentDescription(
            component.number_of_containers, alive, dead, _positions(component), _directive(component.resource)
        )
    return ServiceDescription(
        use=use,
        components=components,
        application_id=service.id,
        properties=service.configuration.properties,
        environment=service.configuration.env,
    )


def _position(container: _Container) -> int:
    match = _INSTANCE.fullmatch(container.component_instance_name)
    if match is None:
        raise Unavailable(f"{container.id}: cannot read the instance name {container.component_instance_name[:60]!r}")
    return int(match[1])


def _positions(component: _Component) -> frozenset[int]:
    """Decommissioned positions; names that no container can have are ignored."""
    matches = map(_INSTANCE.fullmatch, component.decommissioned_instances)
    return frozenset(int(match[1]) for match in matches if match is not None)


def _directive(demand: _Demand) -> str:
    """A component's demand as a ``#DL2`` line has it: ``cpu:2,memory:1024M,gpu:1``."""
    others = (f",{_DL2D_NAMES.get(name, name)}:{amount.value}" for name, amount in (demand.additional or {}).items())
    return f"cpu:{demand.cpus},memory:{demand.memory}M{''.join(others)}"


def _meaning(table: Mapping[str, V], state: str, what: str) -> V:
    """Meaning of a state. Raises ``Unavailable`` where the table lacks it; ``what`` has the state, for the message."""
    if state not in table:
        raise Unavailable(f"{what}: unknown state {state[:60]!r}, from which nothing can be concluded")
    return table[state]


def read_version(client: RestClient) -> str:
    """Version of Hadoop that the active ResourceManager runs. Raises as ``RestClient.get``."""
    return client.get("/ws/v1/cluster/info", _ClusterInfoAnswer).cluster_info.hadoop_version


class NodeSizes:
    """Names of the nodes of one listing, and a node of each size.

    Results are kept, so the time of all checks grows with the number of distinct demands times that of distinct sizes,
    not with the numbers of tasks and nodes.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.names = {node.name for node in nodes}
        names = {node.capacity: node.name for node in reversed(nodes)}
        self._examples = {name: capacity for capacity, name in names.items()}
        self._obstacles: dict[Resources, str] = {}

    def obstacle(self, demand: Resources) -> str:
        """Why no node can ever meet a demand; empty if one can, or if there is no node."""
        if demand not in self._obstacles:
            found = too_small_everywhere(demand, self._examples)
            self._obstacles[demand] = "" if found is None else " has too little ".join(found)
        return self._obstacles[demand]
