"""Checks of ``dl2d check`` on a YARN cluster: whether it answers, and which of its settings to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec

from dl2d.core.errors import ConfigError, NotFound, ResourceManagerError, counted, some_of
from dl2d_yarn.cluster_listing import SERVICES_PATH, read_listing, read_version
from dl2d_yarn.queue_and_growth_limits import read_queues
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.service_description import read_template
from dl2d_yarn.settings import YarnSettings

_API_SERVICE = "yarn.webapp.api-service.enable"
_MAX_TIMEOUT_SECONDS = 5.0
#: Number of queues that are named.
_MAX_QUEUES = 20


class _Property(msgspec.Struct):
    key: str
    value: str = ""


class _Configuration(msgspec.Struct):
    properties: list[_Property]


@dataclass(frozen=True, slots=True)
class Advice:
    """What a setting of the cluster should be (``is_good``, ``value``), and what happens otherwise (``reason``)."""

    key: str
    is_good: Callable[[str], bool]
    value: str
    reason: str


def _at_least(least: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and int(value) >= least


ADVICE = (
    Advice(
        "yarn.resourcemanager.am.max-attempts",
        _at_least(5),
        "20",
        "a service's ApplicationMaster that crashes more often takes its job with it",
    ),
    Advice(
        "yarn.resourcemanager.recovery.enabled",
        lambda value: value == "true",
        "true",
        "without it a restart of the ResourceManager ends all jobs",
    ),
    Advice(
        "yarn.service.framework.path",
        bool,
        "the path of service-dep.tar.gz",
        "without it each submission uploads all jars",
    ),
    Advice(
        "yarn.nodemanager.sleep-delay-before-sigkill.ms",
        _at_least(2000),
        "5000",
        "processes have this time between SIGTERM and SIGKILL when a container is removed",
    ),
)


def check_cluster(settings: YarnSettings, *, client: RestClient | None = None) -> Iterator[tuple[str, bool, str]]:
    """Ask the cluster; yields item, whether it is good, and what was found or is to be changed."""
    try:
        read_template(settings.template)
    except ConfigError as error:
        yield "yarn template", False, str(error)
    try:
        client = client or RestClient.of(settings, timeout_seconds=min(settings.timeout_seconds, _MAX_TIMEOUT_SECONDS))
    except ConfigError as error:
        yield "yarn cluster", False, str(error)
        return
    with client:
        try:
            version, listing = (
                read_version(client),
                read_listing(client, settings.partition, attributes=settings.node_attributes),
            )
        except ResourceManagerError as error:
            yield "yarn cluster", False, str(error)
            return
        yield "yarn cluster", True, f"Hadoop {version}, {counted(len(listing.nodes), 'node')}"
        for remark in listing.remarks:
            yield "yarn cluster", False, remark
        yield _api_service(client)
        yield from _queues(client, settings)
        yield from _configured(client, settings.account)


def _api_service(client: RestClient) -> tuple[str, bool, str]:
    try:
        client.send("GET", f"{SERVICES_PATH}/version")
    except ResourceManagerError as error:
        # Hadoop 3.4 answers 500 where it is off: "API-Service is disabled", with the exceptions around it.
        if isinstance(error, NotFound) or "API-Service" in error.said:
            text = f"the interface is off: set {_API_SERVICE} to true in yarn-site.xml, restart the ResourceManager"
            return "yarn services", False, text
        return "yarn services", False, str(error)
    return "yarn services", True, "the Services REST interface answers"


def _queues(client: RestClient, settings: YarnSettings) -> Iterator[tuple[str, bool, str]]:
    """Whether the scheduler has the queues that the settings name, as far as it tells its queues."""
    try:
        queues = read_queues(client, settings.partition)
    except ResourceManagerError as error:
        yield "yarn queues", True, f"not checked, since the ResourceManager does not show them: {error}"
        return
    if queues is None:
        yield "yarn queues", True, "not checked, since the cluster does not have the capacity scheduler"
        return
    paths = queues.paths()
    problems = []
    if queues.headroom(settings.queue, settings.account) is None:
        problems.append(f"resource_manager.yarn.queue: there is no queue {settings.queue}")
    problems += [
        f"resource_manager.yarn.watch[{index}].queue: no queue matches {rule.queue}"
        for index, rule in enumerate(settings.watch)
        if not any(fnmatchcase(path, rule.queue) for path in paths)
    ]
    for problem in problems:
        yield "yarn queues", False, f"{problem}; there are {some_of(paths, _MAX_QUEUES)}"
    if not problems:
        yield "yarn queues", True, some_of(paths, _MAX_QUEUES)


def _configured(client: RestClient, user: str) -> Iterator[tuple[str, bool, str]]:
    try:
        read = client.get("/conf", _Configuration)
    except ResourceManagerError as error:
        yield "yarn settings", True, f"not checked, since the ResourceManager does not show them: {error}"
        return
    values: Mapping[str, str] = {entry.key: entry.value for entry in read.properties}
    wrong = [advice for advice in ADVICE if not advice.is_good(values.get(advice.key, ""))]
    for advice in wrong:
        given = values.get(advice.key) or "not set"
        yield (
            advice.key,
            False,
            f"is {given} on the ResourceManager: {advice.reason}; set it to {advice.value} in yarn-site.xml",
        )
    proxy = f"hadoop.proxyuser.{user}"
    if not (values.get(f"{proxy}.hosts") and (values.get(f"{proxy}.users") or values.get(f"{proxy}.groups"))):
        text = f"services that users post cannot be resized: set {proxy}.hosts and {proxy}.users in core-site.xml"
        yield proxy, False, text
    elif not wrong:
        yield "yarn settings", True, "as dl2d needs them"
