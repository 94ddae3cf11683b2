"""The YARN service of a job: its name, its description, and the description of a change of size."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from typing import Any, Final

from dl2d.core.errors import Rejected
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_yarn.settings import YarnSettings

#: Roles with as many containers as the job has tasks.
TASK_ROLES: Final = (Role.PS, Role.WORKER)
_NAME: Final = re.compile(r"dl2-([a-z0-9-]+)-(0|[1-9][0-9]{0,11})")
_MAX_NAME: Final = 63
#: What a container needs of its job's environment to ask the daemon for its task.
_ASKING: Final = ("DL2_DAEMON", "DL2_JOB", "DL2_CREDENTIAL")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_./:@%+=\[\]-]")
#: YARN's names of dl2d's resources besides CPUs and memory.
_NAMES: Final = {"gpu": "yarn.io/gpu"}
#: Starts of a coordinator after which YARN gives the job up.
_COORDINATOR_RETRIES: Final = "3"


def service_name(job: JobKey) -> str:
    """Name of a job's service: YARN knows lower-case letters, digits and ``-`` only.

    Raises
    ------
    Rejected
        The job's id has other characters, or is too long.
    """
    name = f"dl2-{job.id}-{job.submitted}"
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise Rejected(
            f"job {job.id}: {name!r} cannot be the name of a YARN service (a-z, 0-9, -; {_MAX_NAME} at most)"
        )
    return name


def job_of_service(name: str, cluster: str) -> JobKey | None:
    """The job whose service has this name; None for services that are not dl2d's."""
    match = _NAME.fullmatch(name)
    return JobKey(cluster, match[1], int(match[2])) if match else None


def service_description(anchor: TaskSpec, settings: YarnSettings) -> dict[str, Any]:
    """The service of a job, as it is posted: one coordinator, and no container of the other roles yet.

    The job's secrets except its credential, its command and its environment are not in it: the containers ask for them.

    Raises
    ------
    Rejected
        A demand cannot be told to YARN, or dl2-run is not found.
    """
    environment = dict(anchor.launch.env)
    runner = settings.runner or shutil.which("dl2-run", path=environment.get("PATH", ""))
    if runner is None:
        raise Rejected("dl2-run is not in the job's PATH: set resource_manager.yarn.runner to its path on the nodes")
    asking = {name: environment.get(name, "") for name in _ASKING}
    for name, value in {"runner": runner, **asking}.items():
        if not value or _UNSAFE.search(value):
            # YARN writes it into a shell script.
            raise Rejected(f"{name} is {value!r}: only letters, digits and . / : @ % + = _ - may be in it")
    demands = {Role.COORDINATOR: Resources.of(cpu=1, memory=settings.coordinator_memory_mib)} | dict(
        anchor.member_demands
    )
    return {
        "name": service_name(anchor.job),
        "version": "1",
        "description": f"elastic job {anchor.job.slug} of dl2d",
        "queue": settings.queue,
        "configuration": {"env": {**asking, "DL2_ROLE": "container", "DL2_INSTANCE": "${COMPONENT_INSTANCE_NAME}"}},
        "components": [
            {
                "name": role.value,
                "number_of_containers": 1 if role is Role.COORDINATOR else 0,
                "launch_command": f"exec {runner}",
                "resource": _resource(demands.get(role, NO_RESOURCES), settings),
                # Only components that are always restarted can change their size.
                "restart_policy": "ON_FAILURE" if role is Role.COORDINATOR else "ALWAYS",
                "configuration": {"properties": _properties(role)},
            }
            for role in (Role.COORDINATOR, *TASK_ROLES)
        ],
    }


def _properties(role: Role) -> dict[str, str]:
    if role is not Role.COORDINATOR:
        return {}
    return {
        # The service ends with its coordinator, and as it does.
        "yarn.service.container-state-report-as-service-state": "true",
        "yarn.service.container-failure.retry.max": _COORDINATOR_RETRIES,
    }


def _resource(demand: Resources, settings: YarnSettings) -> dict[str, Any]:
    amounts = demand.as_dict()
    cpus = max(1, math.ceil(amounts.pop("cpu", 1)))
    memory = math.ceil(amounts.pop("memory", settings.default_memory_mib))
    additional = {}
    for name, amount in amounts.items():
        if amount != int(amount):
            raise Rejected(f"{name}={amount:g}: YARN gives such resources in whole numbers only")
        additional[_NAMES.get(name, name)] = {"value": int(amount), "unit": ""}
    return {"cpus": cpus, "memory": str(memory), "additional": additional}


def flex_request(sizes: Mapping[Role, int]) -> dict[str, Any]:
    """The request that gives components their number of containers."""
    components = [{"name": role.value, "number_of_containers": size} for role, size in sizes.items()]
    return {"state": "FLEX", "components": components}
