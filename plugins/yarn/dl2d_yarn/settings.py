"""Settings of the YARN resource manager: ``resource_manager.yarn`` in the config file."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from dl2d.core.input_validation import AbsolutePath, ClusterName, Items, ManagerSettings, Number, Text, Whole
from dl2d.core.training_job_detection_rules import SIZE, StaticJobRule, Words

_Attribute = Annotated[
    str, Text(300, r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+=[A-Za-z0-9_.-]+", "an attribute such as nm.yarn.io/gpu=a100")
]
_Address = Annotated[str, Text(300, r"https?://[A-Za-z0-9.\[\]:_-]+/?", "an address such as http://rm1:8088")]


#: ``YarnStaticJobRule.size`` of a rule that counts containers.
CONTAINERS = "containers"


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnStaticJobRule(StaticJobRule):
    """Applications that count as training one type of model."""

    #: Patterns as in a shell; ``*`` matches any. The queue is a path, as in ``root.gpu``.
    queue: Words
    type: Words = "*"
    tags: Words = "*"
    #: What counts as a worker: a container (except the ApplicationMaster), or a unit of a resource (``gpu``).
    size: Annotated[str, Text(64, SIZE, "containers or a resource such as gpu")] = CONTAINERS

    def matches(self, *features: str) -> bool:
        """Whether an application of this queue, name, type and tags is one of these."""
        return all(map(fnmatchcase, features, (self.queue, self.name, self.type, self.tags)))


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSettings(ManagerSettings):
    """Checked settings of the YARN resource manager."""

    #: Name of the cluster, the first part of its jobs' keys.
    cluster: ClusterName = "yarn"
    #: Web addresses of the ResourceManagers; a standby's redirects are followed to these only.
    addresses: Annotated[tuple[_Address, ...], Items(16)]
    #: User name that is sent where the cluster has simple authentication; "" is the first part of the principal where
    #: one is set, else the account of the daemon.
    user: Annotated[str, Text(64, "[A-Za-z_][A-Za-z0-9_.-]*", "a user name")] = ""
    #: Kerberos principal of the daemon where the ResourceManager demands SPNEGO; "" for simple authentication.
    principal: Annotated[str, Text(300, r"[^\s@/]+(/[^\s@/]+)?@[^\s@/]+", "a principal such as dl2d/head@REALM")] = ""
    #: File with the keys of the principal; "" for the tickets of the daemon's account (``kinit``).
    keytab: AbsolutePath = ""
    #: Certificate authorities that sign the ResourceManagers' certificates; "" for the system's.
    ca_file: AbsolutePath = ""
    #: Maximum duration of one call to the ResourceManager, seconds.
    timeout_seconds: Annotated[float, Number(600, least=0.1)] = 30.0
    #: Queue in which services run.
    queue: Annotated[str, Text(200, "[A-Za-z0-9_.-]+", "a queue's name")] = "default"
    #: Path of dl2-run on the nodes; "" is where the job's own PATH has it on this machine.
    runner: AbsolutePath = ""
    #: Path of Hadoop's ``yarn`` command on the daemon's machine, which can remove a chosen container; "" without it.
    yarn_command: AbsolutePath = ""
    #: Template of the services, in place of the one that comes with dl2d (Docker images, node labels ...).
    template: AbsolutePath = ""
    #: Memory of the container of a job's coordinator, MiB.
    coordinator_memory_mib: Annotated[int, Whole(64, 2**20)] = 512
    #: Memory of a task that demands none, MiB.
    default_memory_mib: Annotated[int, Whole(64, 2**30)] = 1024
    #: Partition (node label) of the nodes that the queue's services get; "" for the default one.
    partition: Annotated[str, Text(255, "[A-Za-z0-9_-]*", "a node label")] = ""
    #: Attributes of the nodes that the services get, each as ``prefix/name=value``; a node has to have all of them.
    node_attributes: Annotated[tuple[_Attribute, ...], Items(16, least=0)] = ()
    #: Modes observe and shadow: which applications that run without dl2d train, first rule first.
    watch: Annotated[tuple[YarnStaticJobRule, ...], Items(10_000, least=0)] = ()
    #: Leave what applications in other queues wait for to them, instead of growing into it.
    leave_pending: bool = False
    #: Time that nodes have to register again after a restart of the ResourceManager, seconds; no decisions meanwhile.
    node_return_seconds: Annotated[float, Number(3600, least=0)] = 60.0
    #: Minimum time between two reports of a container to the daemon, seconds; a task is asked to stop this much later.
    report_seconds: Annotated[float, Number(60, least=0.1)] = 3.0

    section: ClassVar[str] = "resource_manager.yarn"

    @property
    def account(self) -> str:
        """Name of the daemon's user in YARN."""
        return self.user or re.split("[/@]", self.principal)[0] or getpass.getuser()
