"""Plug-ins by entry point: resource managers, policies, placements. A broken one is logged and skipped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, cast

import structlog

from dl2d.core.errors import ConfigError, Dl2dError, PluginError
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.resource_manager import ResourceManager
from dl2d.policies.common.checkpoint import Checkpoint

log = structlog.get_logger()

MANAGERS = "dl2d.resource_managers"
POLICIES = "dl2d.policies"
PLACEMENTS = "dl2d.placements"

ManagerFactory = Callable[..., ResourceManager]
#: Kinds of parameters that ``policy.settings`` may give.
_NUMBERS = ("float", "int", "bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryArguments:
    """Arguments of a policy's factory; it gets those that it takes."""

    #: What was learned; None for what comes with the policy.
    checkpoint: Checkpoint | None = None
    #: Numbers by the names of the factory's parameters.
    settings: Mapping[str, float | bool] = field(default_factory=dict)
    #: Length of an interval.
    slot_seconds: float | None = None


def available(group: str) -> dict[str, Any]:
    """Everything of a group that can be loaded, by name; what cannot is logged."""
    found = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may fail in any way; the others still count
            log.warning("plug-in cannot be loaded", group=group, name=point.name, error=repr(error))
    return found


def load_policy(name: str, key: str = "policy.name", given: FactoryArguments | None = None) -> Policy:
    """A policy by name, which the setting ``key`` gives, made with what it is given.

    Raises
    ------
    PluginError
        There is none (names those that there are), or it cannot be made.
    ConfigError
        It does not take what it is given; names the key.
    """
    factory = _pick(POLICIES, name, key)
    return cast("Policy", _made(factory, name, key, _arguments(factory, name, given or FactoryArguments())))


def takes_checkpoint(name: str) -> bool:
    """Whether a policy learns: its factory takes a checkpoint. False where there is no such policy."""
    found = available(POLICIES)
    return name in found and "checkpoint" in _parameters(found[name])


def load_placement(name: str) -> Placement:
    """A placement by name. Raises ``PluginError`` naming those that there are, or saying why it cannot be used."""
    found = _made(_pick(PLACEMENTS, name, "placement"), name, "placement", {})
    missing = [each for each in vars(Placement) if not each.startswith("_") and not hasattr(found, each)]
    if missing:
        raise PluginError(f"placement: plug-in {name!r} lacks {', '.join(missing)} of dl2d.core.placement.Placement")
    return cast("Placement", found)


def load_manager(name: str, settings: Mapping[str, object], clock: Callable[[], float]) -> ResourceManager:
    """A resource manager by name, with its part of the settings. Raises ``PluginError`` or ``ConfigError``."""
    factory = cast("ManagerFactory", _pick(MANAGERS, name, "resource_manager.name"))
    return factory(settings, clock=clock)


def _made(factory: Callable[..., Any], name: str, key: str, arguments: Mapping[str, object]) -> object:
    try:
        return factory(**arguments)
    except Dl2dError:
        raise
    except Exception as error:
        raise PluginError(f"{key}: plug-in {name!r} cannot be made: {type(error).__name__}: {error}") from error


def _arguments(factory: Callable[..., Any], name: str, given: FactoryArguments) -> dict[str, object]:
    """Arguments for a factory, checked against its parameters."""
    parameters = _parameters(factory)
    arguments: dict[str, object] = {}
    if given.checkpoint is not None:
        if "checkpoint" not in parameters:
            raise ConfigError(f"policy.checkpoint: policy {name!r} has no checkpoints; leave it empty")
        arguments["checkpoint"] = given.checkpoint
    numbers = {key: kind for key, kind in parameters.items() if kind in _NUMBERS}
    for key, value in given.settings.items():
        if key not in numbers:
            known = f"it has {', '.join(sorted(numbers))}" if numbers else "it has none"
            raise ConfigError(f"policy.settings.{key}: policy {name!r} has no such setting; {known}")
        if isinstance(value, bool) != (numbers[key] == "bool"):
            wanted = "true or false" if numbers[key] == "bool" else "a number"
            raise ConfigError(f"policy.settings.{key}: expected {wanted}, got {value!r}")
        if numbers[key] == "int" and value != int(value):
            raise ConfigError(f"policy.settings.{key}: expected a whole number, got {value!r}")
        arguments[key] = int(value) if numbers[key] == "int" else value
    if numbers.get("slot_seconds") and given.slot_seconds is not None:
        arguments.setdefault("slot_seconds", given.slot_seconds)
    return arguments


def _parameters(factory: Callable[..., Any]) -> dict[str, str]:
    """Keyword parameters of a factory with the names of their types, without None."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables written in C
        return {}
    return {
        parameter.name: str(getattr(parameter.annotation, "__name__", parameter.annotation)).removesuffix(" | None")
        for parameter in found
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _pick(group: str, name: str, key: str) -> Callable[..., Any]:
    found = available(group)
    if name not in found:
        raise PluginError(f"{key}: {name!r} is not installed; installed are {', '.join(found) or 'none'}")
    return cast("Callable[..., Any]", found[name])
