"""Plug-ins by entry point: resource managers, policies, placements. A broken one is reported and passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

import structlog

from dl2d.core.errors import Dl2dError, PluginError
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.resource_manager import ResourceManager

log = structlog.get_logger()

MANAGERS = "dl2d.resource_managers"
POLICIES = "dl2d.policies"
PLACEMENTS = "dl2d.placements"

ManagerFactory = Callable[..., ResourceManager]


def available(group: str) -> dict[str, Any]:
    """Everything of a group that can be loaded, by name; what cannot is logged."""
    found = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may fail in any way; the others still count
            log.warning("plug-in cannot be loaded", group=group, name=point.name, error=repr(error))
    return found


def load_policy(name: str, key: str = "policy.name") -> Policy:
    """A policy by name, which the setting ``key`` gives.

    Raises ``PluginError`` naming those that there are, or saying why it cannot be made.
    """
    return cast("Policy", _make(POLICIES, name, key))


def load_placement(name: str) -> Placement:
    """A placement by name. Raises ``PluginError`` naming those that there are, or saying why it cannot be made."""
    return cast("Placement", _make(PLACEMENTS, name, "placement"))


def load_manager(name: str, settings: Mapping[str, object], clock: Callable[[], float]) -> ResourceManager:
    """A resource manager by name, with its part of the settings. Raises ``PluginError`` or ``ConfigError``."""
    factory = cast("ManagerFactory", _pick(MANAGERS, name, "resource_manager.name"))
    return factory(settings, clock=clock)


def _make(group: str, name: str, key: str) -> object:
    try:
        return _pick(group, name, key)()
    except Dl2dError:
        raise
    except Exception as error:
        raise PluginError(f"{key}: plug-in {name!r} cannot be made: {type(error).__name__}: {error}") from error


def _pick(group: str, name: str, key: str) -> Callable[..., Any]:
    found = available(group)
    if name not in found:
        raise PluginError(f"{key}: there is no {name!r}; installed are {', '.join(found) or 'none'}")
    return cast("Callable[..., Any]", found[name])
