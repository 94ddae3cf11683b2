"""Applications that run without dl2d: which of them are training jobs by the site's rules, and where they run."""

from __future__ import annotations

import pwd
import re
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from dl2d.core.errors import ResourceManagerError
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJob, RmJobState, StaticJob
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.cluster_listing import APPS_PATH, Application, ClusterListing, Vector, read_vector
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.settings import CONTAINERS, YarnStaticJobRule

#: Maximum number of applications whose containers are read each time.
_MAX_READ = 50
_NOBODY_ID = 65534
#: Milliseconds since 1970.
_MILLISECONDS = re.compile(r"[0-9]{1,15}")


class _Container(msgspec.Struct, rename="camel"):
    container_id: str
    node_id: str = ""
    #: Milliseconds since 1970, as a text.
    started_time: str = "0"


class _Containers(msgspec.Struct):
    #: One container is not in a list.
    container: list[_Container] | _Container = []


class _Request(msgspec.Struct, rename="camel"):
    resource_name: str = ""
    num_containers: int = 0
    capability: Vector | None = None


class _Requests(msgspec.Struct, rename="camel"):
    resource_requests: list[_Request] = []


class _RequestsAnswer(msgspec.Struct):
    app: _Requests


@dataclass(frozen=True, slots=True)
class Containers:
    """Containers of an application, without its ApplicationMaster's, when they were read last."""

    #: Number of containers in the list of applications then, the ApplicationMaster's included.
    listed: int = 0
    #: Id of each one's node.
    nodes: tuple[str, ...] = ()
    #: When the first one began, seconds since 1970; 0 before.
    started: float = 0.0
    #: Number of those that it waits for, and all their resources.
    waiting: int = 0
    waiting_resources: Resources = NO_RESOURCES


def read_containers(client: RestClient, application: Application) -> Containers:
    """Ask for an application's containers, and for those that it waits for. Raises as ``RestClient.get``."""
    # All containers are listed with each attempt, also those of later ones.
    path = f"{APPS_PATH}/{application.id}"
    attempt = f"{application.id.replace('application', 'appattempt')}_000001"
    found = client.get(f"{path}/appattempts/{attempt}/containers", _Containers).container
    containers = [
        each for each in (found if isinstance(found, list) else [found]) if not each.container_id.endswith("_000001")
    ]
    # Each request is listed for any node (*), and again for the nodes and racks that it prefers.
    requests = client.get(path, _RequestsAnswer).app.resource_requests
    waiting = [request for request in requests if request.resource_name == "*" and request.num_containers > 0]
    starts = [int(each.started_time) / 1000 for each in containers if _MILLISECONDS.fullmatch(each.started_time)]
    return Containers(
        listed=application.containers,
        nodes=tuple(sorted(each.node_id for each in containers)),
        started=min((start for start in starts if start > 0), default=0.0),
        waiting=sum(request.num_containers for request in waiting),
        waiting_resources=Resources.total(
            read_vector(request.capability) * request.num_containers for request in waiting
        ),
    )


def owner_of(user: str) -> Owner:
    """Account of a user; with the ids of nobody where the daemon's machine has none."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return Owner(user, _NOBODY_ID, _NOBODY_ID)
    return Owner(user, account.pw_uid, account.pw_gid)


class WatchedApplications:
    """Applications that run without dl2d and train, as the rules say, with their containers.

    YARN does not list the size of an application, only the containers that it has. An application that has fewer than
    the rule's ``least`` counts as a training job once it has had them, or waits for them.
    """

    def __init__(self, client: RestClient, rules: Sequence[YarnStaticJobRule]) -> None:
        self._client = client
        self._rules = rules
        self._containers: dict[str, Containers] = {}
        #: Applications that have counted as training jobs.
        self._training: set[str] = set()

    def jobs(self, listing: ClusterListing, own: Container[str]) -> Iterator[RmJob]:
        """The applications of a listing that a rule matches, except dl2d's ``own``; those that train as static jobs."""
        for application in listing.applications if self._rules else ():
            rule = self._matching_rule(application)
            if rule is None or application.id in own:
                continue
            containers = self._containers.get(application.id, Containers())
            nodes = tuple(listing.node_names.get(node, node) for node in containers.nodes)
            static, waits = self._static_job(rule, application, replace(containers, nodes=nodes))
            state = application.state
            # Its ApplicationMaster is started again, or has yet to find a new ResourceManager; containers still run.
            if state is RmJobState.PENDING and application.launched:
                state = RmJobState.RUNNING
            yield RmJob(
                handle=application.id.removeprefix("application_"), state=RmJobState.PENDING if waits else state,
                user=application.user, node=nodes[0] if nodes else "",
                reason=f"waits for {containers.waiting} containers" if waits else application.reason,
                submitted=application.started, ended=application.ended, static=static,
            )  # fmt: skip

    def _static_job(
        self, rule: YarnStaticJobRule, application: Application, containers: Containers
    ) -> tuple[StaticJob | None, bool]:
        """The application as a training job, and whether it waits for its first containers; None if it is none."""
        if application.state is not RmJobState.RUNNING or application.id not in self._containers:
            return None, False
        owner, held = owner_of(application.user), application.used
        known = application.id in self._training
        count = len(containers.nodes) if rule.size == CONTAINERS else int(held.get(rule.size))
        static = rule.static_job(
            application.name, owner, count, held, containers.nodes,
            started=containers.started or application.launched, known=known,
        )  # fmt: skip
        if static is not None:
            self._training.add(application.id)
            return static, False
        wanted = held + containers.waiting_resources
        count = len(containers.nodes) + containers.waiting if rule.size == CONTAINERS else int(wanted.get(rule.size))
        static = rule.static_job(application.name, owner, count, wanted, (), started=0.0)
        return static, static is not None

    def _matching_rule(self, application: Application) -> YarnStaticJobRule | None:
        features = (application.queue, application.name, application.type, application.tags)
        return next((rule for rule in self._rules if rule.matches(*features)), None)

    def read(self, applications: Collection[Application]) -> Iterator[str]:
        """Read the containers of applications whose containers may have changed; yields messages about failures.

        Reads at most ``_MAX_READ``, in the order in which they were read last.
        """
        due = {
            application.id: application
            for application in applications
            if application.state is RmJobState.RUNNING
            and self._is_outdated(application)
            and self._matching_rule(application) is not None
        }
        # First those that have never been read.
        places = {name: place for place, name in enumerate(self._containers)}
        order = sorted(due, key=lambda each: places.get(each, -1))
        for application in (due[each] for each in order[:_MAX_READ]):
            before = self._containers.pop(application.id, None)
            try:
                containers = read_containers(self._client, application)
            except ResourceManagerError as error:
                if before is not None:
                    self._containers[application.id] = before
                yield f"{application.id}: {error}"
            else:
                started = before.started if before is not None else 0.0
                self._containers[application.id] = replace(containers, started=started or containers.started)
        present = {application.id for application in applications}
        self._containers = {name: known for name, known in self._containers.items() if name in present}
        self._training &= present

    def _is_outdated(self, application: Application) -> bool:
        known = self._containers.get(application.id)
        if known is None or known.listed != application.containers or known.waiting > 0:
            return True
        # An ApplicationMaster asks for containers some seconds after YARN lists it as running.
        return application.id not in self._training
