"""Applications of users who know nothing of dl2d: which of them train, as a site's rules say, and where they run."""

from __future__ import annotations

import pwd
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Final

import msgspec

from dl2d.core.errors import ResourceManagerError
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJob, RmJobState, StaticJob
from dl2d_yarn.listing import APPS_PATH, Application, ClusterListing
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.settings import CONTAINERS, YarnStaticJobRule

#: Number of applications that are asked for their nodes, each time.
_MAX_ASKED: Final = 5
_NOBODY: Final = 65534


def features_of(application: Application) -> tuple[str, str, str, str]:
    """What rules look at."""
    return application.queue, application.name, application.type, application.tags


def static_job(
    application: Application, nodes: Sequence[str], owner: Owner, rules: Sequence[YarnStaticJobRule]
) -> StaticJob | None:
    """What an application is by the first rule that takes it; None where none does, or it is too small.

    ``nodes`` has the node of each container except the master's; empty where they are not known yet.
    """
    rule = next((rule for rule in rules if rule.takes(*features_of(application))), None)
    if rule is None:
        return None
    count = len(nodes) if rule.size == CONTAINERS else int(application.used.get(rule.size))
    started = float(application.started)
    return rule.static_job(application.name, owner, count, application.used, nodes, started=started)


class _Container(msgspec.Struct, rename="camel"):
    container_id: str
    node_id: str = ""


class _Containers(msgspec.Struct):
    #: One container is not in a list.
    container: list[_Container] | _Container = []


def read_nodes(client: RestClient, application: str) -> tuple[str, ...]:
    """Ids of the nodes of an application's containers except its master's, one for each. Raises as ``get``."""
    # All containers are listed with each attempt, also those of later ones.
    attempt = f"{application.replace('application', 'appattempt')}_000001"
    found = client.get(f"{APPS_PATH}/{application}/appattempts/{attempt}/containers", _Containers).container
    containers = found if isinstance(found, list) else [found]
    return tuple(sorted(each.node_id for each in containers if not each.container_id.endswith("_000001")))


def owner_of(user: str) -> Owner:
    """A user's account; users need none on the daemon's machine."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return Owner(user, _NOBODY, _NOBODY)
    return Owner(user, account.pw_uid, account.pw_gid)


class WatchedApplications:
    """Applications that run without dl2d and train, as the rules say, with the nodes of their containers."""

    def __init__(self, client: RestClient, rules: Sequence[YarnStaticJobRule]) -> None:
        self._client = client
        self._rules = rules
        #: By application: number of its containers when it was asked for, and the nodes of all except the master's.
        self._nodes: dict[str, tuple[int, tuple[str, ...]]] = {}

    def jobs(self, listing: ClusterListing, own: Container[str]) -> Iterator[RmJob]:
        """The applications of a listing as static jobs, except dl2d's ``own``."""
        for application in listing.applications if self._rules else ():
            _, ids = self._nodes.get(application.id, (0, ()))
            nodes = [listing.node_names.get(node, node) for node in ids]
            static = static_job(application, nodes, owner_of(application.user), self._rules)
            if static is not None and application.id not in own:
                yield RmJob(
                    handle=application.id.removeprefix("application_"), state=application.state, user=application.user,
                    node=nodes[0] if nodes else "", reason=application.reason, submitted=application.started,
                    ended=application.ended, static=static,
                )  # fmt: skip

    def read_nodes(self, applications: Collection[Application]) -> Iterator[str]:
        """Ask where the containers of some applications are, whose number has changed; yields what went wrong."""
        changed = [
            application
            for application in applications
            if application.state is RmJobState.RUNNING
            and self._nodes.get(application.id, (0, ()))[0] != application.containers
            and any(rule.takes(*features_of(application)) for rule in self._rules)
        ]
        for application in changed[:_MAX_ASKED]:
            try:
                nodes = read_nodes(self._client, application.id)
            except ResourceManagerError as error:
                yield f"{application.id}: {error}"
            else:
                self._nodes[application.id] = application.containers, nodes
        present = {application.id for application in applications}
        self._nodes = {name: known for name, known in self._nodes.items() if name in present}
