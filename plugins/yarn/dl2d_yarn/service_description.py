"""The YARN service of a job: its name, its description by template, and the description of a change of size."""

from __future__ import annotations

import json
import math
import posixpath
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dl2d.core.errors import ConfigError, Rejected, Unavailable
from dl2d.core.jobs import JobKey, JobRequest, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.settings import YarnSettings

#: Roles with as many containers as the job has tasks.
TASK_ROLES = (Role.PS, Role.WORKER)
_JOB_SERVICE_NAME = re.compile(r"dl2-([a-z0-9-]+)-(0|[1-9][0-9]{0,11})")
_MAX_NAME_LENGTH = 63
#: Variables that identify a job to the daemon.
_JOB_VARIABLES = ("DL2_JOB", "DL2_CREDENTIAL")
#: Variables with which a container asks the daemon for its task.
_DAEMON_VARIABLES = ("DL2_DAEMON", *_JOB_VARIABLES)
#: Variable with the daemon's certificate, where the nodes do not trust the authority that signed it.
_CERTIFICATE_VARIABLE = "DL2_DAEMON_CERTIFICATE"
#: Variable with the uid of the daemon's account, where no certificate proves who listens at its address.
_UID_VARIABLE = "DL2_DAEMON_UID"
#: Characters that bash interprets between double quotes.
_BASH_SPECIAL = re.compile(r'[\\"$`]')
#: Characters of the tokens that YARN replaces: ``${USER}``, ``{{PATH}}``, ``<LOG_DIR>``.
_TOKEN_CHARACTERS = re.compile(r"[{}<]")
#: YARN's names of dl2d's resources besides CPUs and memory.
_YARN_NAMES = {"gpu": "yarn.io/gpu"}
#: Prefix of the service properties that hold the request of a service's user.
PROPERTY_PREFIX = "dl2."
#: Maximum length of all ``dl2.*`` properties of a service together, in characters.
MAX_REQUEST_CHARACTERS = 64 * 1024
#: Variable with the secret by which the containers of a user's service register.
SECRET_VARIABLE = "DL2_PROOF"  # noqa: S105  (a name)
#: Names that YARN accepts for services. An application with any other name is no service, whatever its type.
SERVICE_NAME = re.compile(rf"[a-z][a-z0-9-]{{0,{_MAX_NAME_LENGTH - 1}}}")


def service_name(job: JobKey) -> str:
    """Name of a job's service; YARN accepts only lower-case letters, digits and ``-`` in it.

    Raises ``Rejected`` if the job's id has other characters, or is too long.
    """
    name = f"dl2-{job.id}-{job.submitted}"
    if not _JOB_SERVICE_NAME.fullmatch(name) or len(name) > _MAX_NAME_LENGTH:
        raise Rejected(
            f"job {job.id}: {name!r} cannot be the name of a YARN service, which has at most {_MAX_NAME_LENGTH} "
            "characters: a-z, 0-9 and -"
        )
    return name


def job_of_service(name: str, cluster: str) -> JobKey | None:
    """The job whose service has this name; None for services that are not dl2d's."""
    match = _JOB_SERVICE_NAME.fullmatch(name)
    return JobKey(cluster, match[1], int(match[2])) if match else None


def service_description(anchor: TaskSpec, settings: YarnSettings) -> dict[str, Any]:
    """Description of a job's service as the daemon posts it: one coordinator, and no container of the other roles yet.

    Of the job's secrets it has only the credential. Command and environment are not in it: containers ask for them.

    Raises
    ------
    Rejected
        A demand cannot be told to YARN, or dl2-run is not found.
    """
    environment = dict(anchor.launch.env)
    runner = settings.runner or shutil.which("dl2-run", path=environment.get("PATH", ""))
    if runner is None:
        raise Rejected("dl2-run is not in the job's PATH: set resource_manager.yarn.runner to its path on the nodes")
    variables = {name: environment.get(name, "") for name in _DAEMON_VARIABLES}
    variables |= {name: environment[name] for name in (_CERTIFICATE_VARIABLE, _UID_VARIABLE) if environment.get(name)}
    for name, value in {"runner": runner, **variables}.items():
        if not value:
            raise Rejected(f"{name} is empty: the job's containers could not ask the daemon for their tasks")
    description = f"elastic job {anchor.job.slug} of dl2d"
    return _fill_template(
        service_name(anchor.job), description, variables, f"exec {shlex.quote(runner)}", dict(anchor.member_demands),
        settings,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedJob:
    """A job whose service its user posts."""

    name: str
    request: JobRequest
    #: Keys and values of the request as ``#DL2`` lines have them; demands are the resources of the components.
    directives: Mapping[str, str]
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]


def posted_description(
    job: PostedJob,
    settings: YarnSettings,
    *,
    daemon: str,
    certificate: str = "",
    daemon_uid: str = "",
    archive: str = "",
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """Description of a job's service as its user posts it: the request in ``dl2.*`` properties, and a new secret.

    Parameters
    ----------
    daemon
        URL of the job API.
    certificate
        Value of ``DL2_DAEMON_CERTIFICATE``; "" where the nodes trust the authority that signed the daemon's.
    daemon_uid
        Uid of the daemon's account; "" where it is not known, or a certificate proves who the daemon is.
    archive
        URI of an archive of ``dl2d pack``, which every container has as ``env``; "" for dl2-run of the settings.
    files
        URIs of files that every container has in its folder.

    Raises
    ------
    Rejected
        The job's name or a demand cannot be told to YARN, or dl2-run is not found.
    """
    if not SERVICE_NAME.fullmatch(job.name):
        raise Rejected(
            f"{job.name!r} cannot be the name of a YARN service, which begins with a letter and has at most "
            f"{_MAX_NAME_LENGTH} characters (a-z, 0-9 and -): change `name` in the job file"
        )
    runner = "env/bin/dl2-run" if archive else settings.runner or shutil.which("dl2-run")
    if runner is None:
        raise Rejected("dl2-run is not in PATH: give --archive, or set resource_manager.yarn.runner")
    command = f"exec {shlex.join((runner, *job.argv))}"
    if not archive and not files:
        command = f"cd {shlex.quote(job.cwd)} && {command}"
    demands = {role: job.request.demand(role) for role in TASK_ROLES}
    environment = {**job.env, "DL2_DAEMON": daemon, SECRET_VARIABLE: secrets.token_hex(32)}
    if certificate:
        environment[_CERTIFICATE_VARIABLE] = certificate
    if daemon_uid:
        environment[_UID_VARIABLE] = daemon_uid
    service = _fill_template(job.name, f"elastic job of dl2d: {job.name}", environment, command, demands, settings)
    configuration = service["configuration"]
    configuration["properties"] = {f"{PROPERTY_PREFIX}{key}": value for key, value in job.directives.items()}
    given = [{"type": "ARCHIVE", "src_file": archive, "dest_file": "env"}] if archive else []
    given += [{"type": "STATIC", "src_file": uri, "dest_file": posixpath.basename(uri)} for uri in files]
    configuration["files"] = given
    return service


def _fill_template(
    name: str,
    description: str,
    environment: Mapping[str, str],
    command: str,
    demands: Mapping[Role, Resources],
    settings: YarnSettings,
) -> dict[str, Any]:
    """The site's template, or the default one, with these values filled in.

    ``command`` is a shell command in which ``shlex`` has quoted what comes from users.
    """
    try:
        service = read_template(settings.template)
    except ConfigError as error:
        raise Rejected(str(error)) from None
    service |= {"name": name, "description": description, "queue": settings.queue}
    service["configuration"]["env"] |= {name: _escape(value, '""') for name, value in environment.items()}
    coordinator = Resources.of(cpu=1, memory=settings.coordinator_memory_mib)
    for component in service["components"]:
        role = Role(component["name"])
        demand = coordinator if role is Role.COORDINATOR else demands.get(role, NO_RESOURCES)
        component |= {"launch_command": _escape(command, "''"), "resource": _resource(demand, settings)}
        if settings.node_attributes:
            policy = component.setdefault("placement_policy", {})
            policy.setdefault("constraints", []).append(_node_attribute_constraint(settings.node_attributes))
    return service


def _escape(text: str, quotes: str) -> str:
    """``text``, escaped so that a container gets it unchanged.

    YARN replaces its tokens, and then writes ``exec /bin/bash -c "COMMAND"`` and ``export NAME="VALUE"``; it escapes
    nothing. ``quotes`` ends a quotation and begins another one, which splits tokens: two single quotes in a command,
    where ``shlex`` has put all characters of tokens between single quotes, and two double quotes in a variable.
    """
    return _TOKEN_CHARACTERS.sub(rf"\g<0>{quotes}", _BASH_SPECIAL.sub(r"\\\g<0>", text))


def _node_attribute_constraint(attributes: Sequence[str]) -> dict[str, Any]:
    """Placement constraint: only nodes with all of these attributes."""
    values = dict(attribute.split("=", 1) for attribute in attributes)
    wanted = {name: [value] for name, value in values.items()}
    return {"type": "AFFINITY", "scope": "NODE", "node_attributes": wanted}


def read_template(path: str) -> dict[str, Any]:
    """Template of services from a file; "" for the one that comes with dl2d.

    Raises
    ------
    ConfigError
        It cannot be read, or lacks what a service needs.
    """
    file = Path(path) if path else resources.files("dl2d_yarn") / "templates" / "service.json"
    try:
        service: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = sorted(component["name"] for component in service["components"])
        service["configuration"]["env"] |= {}
    except OSError as error:
        raise ConfigError(f"resource_manager.yarn.template: {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        problem = f"not a service that dl2d can use ({type(error).__name__}: {error})"
    else:
        if names == ["coordinator", "ps", "worker"]:
            return service
        problem = f"a service with the components {', '.join(names)}"
    raise ConfigError(
        f"resource_manager.yarn.template: {file} is {problem}: it must be JSON with the components coordinator, ps and "
        "worker, and with configuration.env"
    )


def _resource(demand: Resources, settings: YarnSettings) -> dict[str, Any]:
    amounts = demand.as_dict()
    cpus = max(1, math.ceil(amounts.pop("cpu", 1)))
    memory = math.ceil(amounts.pop("memory", settings.default_memory_mib))
    additional = {}
    for name, amount in amounts.items():
        if amount != int(amount):
            raise Rejected(f"{name}={amount:g}: YARN gives {name} in whole numbers only")
        additional[_YARN_NAMES.get(name, name)] = {"value": int(amount), "unit": ""}
    return {"cpus": cpus, "memory": str(memory), "additional": additional}


def read_application_id(answer: bytes) -> str:
    """Id of the application in YARN's answer to the POST of a service. Raises ``Unavailable`` if it has none."""
    match = re.search(r"application_[0-9]+_[0-9]+", answer.decode(errors="replace"))
    if match is None:
        raise Unavailable("no application id in YARN's answer to a service", said=repr(answer[:300]))
    return match[0]


def check_same_job(application: str, environment: Mapping[str, str], description: Mapping[str, Any]) -> None:
    """Raise ``Rejected`` if a service that was found is not the one of this description, but that of another dl2d."""
    name, given = description["name"], description["configuration"]["env"]
    if any(environment.get(variable) != given[variable] for variable in _JOB_VARIABLES):
        raise Rejected(
            f"{name}: {application} of another dl2d daemon has this name; give each daemon its own cluster and "
            "resource_manager.yarn.user"
        )


def flex_request(sizes: Mapping[Role, int]) -> dict[str, Any]:
    """Body of the request that sets the number of containers of components."""
    components = [{"name": role.value, "number_of_containers": size} for role, size in sizes.items()]
    return {"state": "FLEX", "components": components}
