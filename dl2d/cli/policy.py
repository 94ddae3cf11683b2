"""``dl2d policy``: installed policies, the ones in use, and the versions of learned ones."""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dl2d.cli.daemon_access.open_store import open_store, store_if_current
from dl2d.cli.output import moment, print_json, print_tables, print_text, table
from dl2d.cli.progress_bars import shown_progress
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.daemon_mode_and_canary import CanaryState, Mode
from dl2d.core.errors import (
    Dl2dError,
    GateRefused,
    LiveVersionChanged,
    PolicyError,
    RegistryError,
    RequestError,
    WorkloadError,
)
from dl2d.core.policy_registry import Trial, Version, VersionState
from dl2d.daemon.policy_versions.active_version import (
    configured_checkpoint,
    current_checkpoint,
    factory_arguments,
    keep_version,
    nodes_and_requests,
    read_version,
    roll_back,
    slot_length_warning,
)
from dl2d.plugins import (
    PLACEMENTS,
    POLICIES,
    available,
    load_placement,
    load_policy,
    takes_checkpoint,
)
from dl2d.policies.common.checkpoint import DIGITS, checkpoint_in, read_checkpoint
from dl2d.tick.policy_check.policy_starts_jobs_check import start_check

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore
    from dl2d.store.tables.policy_versions import SqlRegistry

app = typer.Typer(no_args_is_help=True, help="Policies, which decide how many tasks each job gets.")

_ReasonOption = Annotated[str, option("Reason to record.", "--reason")]


@app.callback()
def policy() -> None:
    """Policies, which decide how many tasks each job gets."""


@app.command("list")
def list_policies(as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """List policies, placements and the versions of learned policies."""
    settings = load_settings(config)
    versions: tuple[Version, ...] = ()
    trials: tuple[Trial, ...] = ()
    with store_if_current(settings) as store:
        cause = "" if store is None else _fallback_cause(settings, store)
        found = _found(settings, store, cause)
        if store is not None:
            registry = store.registry
            versions, trials = registry.versions(), registry.trials(limit=1000)
            found |= {
                "versions": versions,
                "trials": trials,
                "changes": registry.changes(limit=1000),
                "learning": registry.runs(limit=100),
            }
    if as_json:
        print_json(found)
        return
    rows = [
        (kind, str(entry["name"]), str(entry.get("version", "")), str(entry["charge"] or ""), str(entry["about"]))
        for kind in ("policy", "placement")
        for entry in found[kind]
    ]
    print_tables(table(("KIND", "NAME", "VERSION", "IN CHARGE", "ABOUT"), rows))
    if cause:
        print_text(f"\nthe fallback made the last decision: {cause}")
    if versions:
        by_digest = {trial.candidate: trial for trial in reversed(trials)}
        typer.echo()
        print_tables(
            table(
                ("POLICY", "VERSION", "STATE", "REGISTERED", "PARENT", ">JOBS", "TRIAL", "ORIGIN"),
                [_version_row(each, by_digest.get(each.digest)) for each in versions],
            )
        )


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="First digits of a version's digest, or the folder of a checkpoint.")],
    force: Annotated[
        bool, option("Promote even if the gate refuses. Needs --reason, which is recorded.", "--force")
    ] = False,
    reason: _ReasonOption = "",
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Make a version of the configured policy live if it passes the gate.

    It decides from the next interval on; in mode shadow without effect, in mode observe not at all. A checkpoint is
    registered first. A version passes the gate if it starts jobs on an idle cluster like this site's, and jobs of
    recorded days end sooner with it than with the present version. An earlier trial that it passed against the present
    version counts, unless it was rolled back or rejected since.
    """
    if force and not reason.strip():
        raise typer.BadParameter("--force needs --reason: it is recorded with the promotion")
    settings = load_settings(config)
    name = _learned(settings)
    with open_store(settings) as store:
        registry = store.registry
        known = _matching(registry, name, version)
        if known is None:
            folder = checkpoint_in(version)
            checkpoint = read_checkpoint(folder, policy=name)
            load_policy(name, given=factory_arguments(settings, checkpoint))  # it has to be one that can decide
            origin = f"checkpoint {folder.absolute()}"
            known = keep_version(checkpoint, settings.versions_path, registry, at=time.time(), origin=origin)
        why, passed = reason or "promoted by hand", ""
        live = registry.live(name)
        try:
            passed = _pass_gate(settings, store, known)
        except GateRefused as error:
            if not force:
                raise GateRefused(
                    f"{error}; nothing was changed; to promote it anyway, add --force --reason TEXT"
                ) from None
            why = f"{why} (forced: {error})"
        else:
            why += f" (passed the gate: {passed})" if passed else ""
        # The comparison, which may take minutes, was with the version that was live before it.
        unchanged = None if force else ("" if live is None else live.digest,)
        try:
            now = registry.change(
                name, known.digest, VersionState.LIVE, at=time.time(), by=getpass.getuser(), reason=why, live=unchanged
            )
        except LiveVersionChanged:
            raise GateRefused(
                f"another version of {name} went live meanwhile; nothing was changed; promote again, to compare with it"
            ) from None
        _tell(now, settings.mode, as_json=as_json)
        if warning := slot_length_warning(settings, read_version(now)):
            typer.echo(f"warning: {warning}", err=True)
        if passed and not as_json:
            print_text(f"passed the gate: {passed}")


def _pass_gate(settings: Settings, store: SqlStore, version: Version) -> str:
    """Compare a version with the present one and record the trial; returns the result, empty if it is live already.

    Raises
    ------
    GateRefused
        It does not pass; says why.
    PolicyError
        It cannot decide at all.
    """
    # The simulator, which no other command here waits for.
    from dl2d.cli.policy_trials import trial_on_recorded_days as trials  # noqa: PLC0415
    from dl2d.cli.policy_trials.check_trained_policy import replay_line, replayed  # noqa: PLC0415

    name, registry = version.policy, store.registry
    if version.state is VersionState.LIVE:
        return ""
    what = f"{name} version {version.digest[:DIGITS]}"
    checkpoint = read_version(version)
    policy = load_policy(name, given=factory_arguments(settings, checkpoint))
    placement, (nodes, requests) = load_placement(settings.placement), nodes_and_requests(store)
    started = start_check(policy, placement, nodes, requests)
    if started.error:
        raise PolicyError(f"{what} {started.problem}; it cannot be promoted")
    if started.waiting:
        raise GateRefused(f"{what} {started.problem}")
    live = trials.deciding(settings, registry)
    earlier = trials.passed_trial(settings, registry, version, live)
    on_trial = settings.mode is Mode.CANARY and version.state is VersionState.CANDIDATE
    if earlier is None and on_trial and live.digest == version.digest:
        raise GateRefused(
            f"{what} is being tried in mode canary, which has no result yet: it goes live by itself as soon as it is "
            f"surely better than {settings.policy.fallback} (`dl2d status` shows how it stands)"
        )
    if earlier is None and settings.mode.acts and live.digest == version.digest:
        if version.state is VersionState.REJECTED:
            changes = registry.changes(name, limit=1000)
            why = next((each.reason for each in changes if each.digest == version.digest), "by the gate")
            raise GateRefused(f"{what} was rejected ({why})")
        raise GateRefused(f"{what} decides already, so there is nothing to compare it with")
    with shown_progress() as tell:
        replays = replayed(settings, trials.policy_of(settings, checkpoint), nodes, requests, tell=tell)
    if replays.problem:
        raise GateRefused(f"{what} {replays.problem}")
    if replays.ended < replays.jobs:
        typer.echo(replay_line(replays), err=True)
    if earlier is not None:
        return earlier.reason
    with shown_progress() as tell:
        try:
            days = trials.recorded_days(
                settings, store, now=time.time(), seed=settings.learning.seed, tell=tell, candidate=checkpoint,
                assume_speeds=not settings.mode.acts,
            )  # fmt: skip
        except WorkloadError as error:
            against = "the live policy version" if settings.mode.acts else "the site's scheduler"
            raise GateRefused(f"{what} cannot be compared with {against}: {error.problem}") from None
        current = trials.compared_with(settings, days, live)
        candidate = trials.TrialPolicy(version.digest, trials.policy_of(settings, checkpoint))
        trial = trials.on_trial(settings, name, days, candidate, current, tell=tell)
    registry.add_trial(trial)
    if not trial.passed:
        raise GateRefused(f"{what} does not pass the gate: {trial.reason}")
    return trial.reason


@app.command()
def rollback(reason: _ReasonOption = "", as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """Make the version live again that the present one replaced."""
    settings = load_settings(config)
    name = _learned(settings)
    with open_store(settings) as store:
        why = reason or "rolled back by hand"
        now = roll_back(store.registry, name, at=time.time(), by=getpass.getuser(), reason=why)
        _tell(now, settings.mode, as_json=as_json)


def _learned(settings: Settings) -> str:
    name = settings.policy.name
    if not takes_checkpoint(name):
        raise RequestError(
            "policy.name", f"policy {name!r} is not a learned one and has no versions; set policy.name: dl2"
        )
    return name


def _matching(registry: SqlRegistry, name: str, text: str) -> Version | None:
    """The version that a text means; None where it is a folder."""
    if Path(text).exists():
        return None
    found = [each for each in registry.versions(name) if each.digest.startswith(text.lower())] if text else []
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(each.digest[:DIGITS] for each in found[:5])
        raise RegistryError(f"{len(found)} versions of {name} begin with {text!r} ({some}); give more digits")
    raise RegistryError(f"{text!r} is neither a version of {name} nor a folder; `dl2d policy list` shows all versions")


def what_live_means(mode: Mode) -> str:
    """What the live version of the configured policy does in a mode, in words that follow its name."""
    if mode is Mode.OBSERVE:
        return "is live, but in mode observe no policy decides"
    effect = " in mode shadow, which changes nothing on the cluster" if mode is Mode.SHADOW else ""
    return f"decides from the next interval on{effect}"


def _tell(version: Version, mode: Mode, *, as_json: bool) -> None:
    if as_json:
        print_json(version)
        return
    typer.echo(f"{version.policy} version {version.digest[:DIGITS]} {what_live_means(mode)} ({version.origin})")


def _version_row(version: Version, trial: Trial | None) -> tuple[str, ...]:
    told = "-"
    if trial is not None:
        change = "" if trial.change is None else f" {trial.change:+.1%}"
        told = ("passed" if trial.passed else "failed") + change
    return (
        version.policy, version.digest[:DIGITS], str(version.state), moment(version.at), version.parent[:DIGITS] or "-",
        str(version.jobs), told, version.origin,
    )  # fmt: skip


def _fallback_cause(settings: Settings, store: SqlStore) -> str:
    """Why the fallback made the last recorded decision in the policy's place; empty if it did not.

    In mode canary the newest canary is asked first, since the record of a slot without jobs does not have the cause.
    """
    for canary in store.canaries(limit=1) if settings.mode is Mode.CANARY else ():
        if canary.state is CanaryState.WITHDRAWN and canary.policy == settings.policy.name:
            return f"policy {canary.policy} was withdrawn (canary {canary.number}): {canary.reason}"
    slot = store.slot(store.last_slot_number())
    return "" if slot is None else (slot.shadow or slot.proposed).fallback_cause


def _found(settings: Settings, store: SqlStore | None, fallback_cause: str) -> dict[str, Any]:
    name, fallback = settings.policy.name, settings.policy.fallback
    charges = {fallback: "fallback", name: "decides"}
    if fallback_cause and name != fallback:
        charges = {fallback: "decides", name: "fails"}
    policies: list[dict[str, object]] = [
        {
            "name": name,
            "version": _version_of(name, settings, store),
            "charge": charges.get(name),
            "about": _about(factory),
        }
        for name, factory in available(POLICIES).items()
    ]
    placements: list[dict[str, object]] = [
        {
            "name": load_placement(name).name,
            "charge": "places" if name == settings.placement else None,
            "about": _about(factory),
        }
        for name, factory in available(PLACEMENTS).items()
    ]
    return {"policy": policies, "placement": placements}


def _version_of(name: str, settings: Settings, store: SqlStore | None) -> str:
    """Of the policy in charge as it decides; of others made with nothing, empty for one that needs a checkpoint."""
    try:
        if name != settings.policy.name:
            return load_policy(name).version
        if takes_checkpoint(name) and store is not None:
            checkpoint = current_checkpoint(settings, store.registry, name)
        else:
            checkpoint = configured_checkpoint(settings)
        return load_policy(name, given=factory_arguments(settings, checkpoint)).version
    except Dl2dError:
        return ""


def _about(factory: object) -> str:
    return (getattr(factory, "__doc__", None) or "").strip().partition("\n")[0].replace("``", "")
