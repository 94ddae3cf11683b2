"""Applications of users who know nothing of dl2d: which of them train, as a site's rules say, and where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import StaticJob
from dl2d.core.resources import Resources
from dl2d_yarn.listing import APPS_PATH, Application
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.settings import CONTAINERS, WatchRule

_MAX_TASKS: Final = 10_000


def features_of(application: Application) -> tuple[str, str, str, str]:
    """What rules look at."""
    return application.queue, application.name, application.type, application.tags


def static_job(
    application: Application, nodes: Sequence[str], owner: Owner, rules: Sequence[WatchRule]
) -> StaticJob | None:
    """What an application is by the first rule that takes it; None where none does, or it is too small.

    ``nodes`` has the node of each container except the master's; empty where they are not known yet.
    """
    rule = next((rule for rule in rules if rule.takes(*features_of(application))), None)
    if rule is None:
        return None
    count = len(nodes) if rule.size == CONTAINERS else int(application.used.get(rule.size))
    if count < max(rule.least, rule.ps + 1) or count > _MAX_TASKS:
        return None
    return StaticJob(
        name="".join(char if char.isprintable() else "?" for char in application.name)[:128].strip() or rule.model,
        model=rule.model,
        owner=owner,
        workers=count - rule.ps,
        ps=rule.ps,
        task=Resources.of({name: amount / count for name, amount in application.used.as_dict().items()}),
        nodes=tuple(nodes[number * len(nodes) // count] for number in range(count)) if nodes else (),
        limit=rule.hours * 3600.0,
        started=float(application.started),
    )


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
