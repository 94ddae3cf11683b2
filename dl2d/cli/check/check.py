"""``dl2d check``: validation of the configuration and of job files beside a running daemon."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich import filesize

from dl2d.cli.canary_summary import canary_sentence, newest_canary
from dl2d.cli.check.daemon_preflight import (
    AS_ACCOUNT,
    Finding,
    address_problem,
    folder_problem,
    manager_answers,
    unusable_certificate,
)
from dl2d.cli.check.reachability_check import jobs_find_daemon, probe_findings
from dl2d.cli.daemon_access.job_views_from_store_or_api import is_hidden
from dl2d.cli.daemon_access.open_store import open_store, store_if_current
from dl2d.cli.daemon_access.read_daemon_health import daemon_health
from dl2d.cli.jobs.job_file import JobFile, is_batch_script, read_batch_script, read_bounded
from dl2d.cli.jobs.status import MODE_WORDS
from dl2d.cli.optional_packages import MissingExtraError
from dl2d.cli.output import print_json, print_text
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.cluster import Node
from dl2d.core.daemon_mode_and_canary import CanaryState, Mode
from dl2d.core.errors import Dl2dError, counted
from dl2d.core.job_request_parser import RequestRules
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import Version
from dl2d.core.resource_manager import RmListing
from dl2d.core.training_job_detection_rules import StaticJobRule
from dl2d.daemon.api.job_admission import check_feasible
from dl2d.daemon.key_and_address_files import load_credentials
from dl2d.daemon.policy_versions.active_version import (
    REPAIR,
    check_learning,
    configured_checkpoint,
    factory_arguments,
    gate_problem,
    live_checkpoint,
    nodes_and_requests,
    slot_length_warning,
)
from dl2d.daemon.tick_settings_from_configuration import manager_settings
from dl2d.local.manager import check_private
from dl2d.local.settings import LocalSettings
from dl2d.plugins import MANAGERS, PLACEMENTS, POLICIES, load_placement, load_policy, takes_checkpoint
from dl2d.policies.common.checkpoint import DIGITS, Checkpoint
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_check.policy_starts_jobs_check import start_check
from dl2d_slurm.cluster_check.configuration_advice import (
    Advice,
    configuration_advice,
    munge_socket_problem,
    unsuitable_options_advice,
)
from dl2d_slurm.settings import SlurmSettings
from dl2d_slurm.submission.sbatch_options import options_of_script, refuse_options, remarks
from dl2d_slurm.submission.submission_backends import chosen_backend
from dl2d_yarn.cluster_check import check_cluster
from dl2d_yarn.settings import YarnSettings

T = TypeVar("T")
_ANSWER_SECONDS = 3.0
#: Nodes that are named in full.
_MAX_NODES = 8
_SLURM_COMMANDS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "munge", "unmunge")


def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="Job files (YAML) or batch scripts (#DL2 lines, #SBATCH --dl2-...)."),
    ] = None,
    probe: Annotated[
        bool,
        option(
            "Submit a small job that checks from a node that jobs reach the daemon; it takes up to two minutes.",
            "--slurm-probe",
        ),
    ] = False,
    probe_user: Annotated[str, option("Submit it as this user, which root may.", "--probe-user", metavar="NAME")] = "",
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Check the configuration, what it names, and job files; exit 2 if anything is wrong.

    Accounts other than root and the daemon's check FILE arguments only.
    """
    findings = list(_findings(config, files or [], probe=probe or bool(probe_user), probe_user=probe_user))
    if as_json:
        print_json({"good": all(finding.good for finding in findings), "findings": findings})
    else:
        width = max(len(finding.item) for finding in findings)
        for finding in findings:
            typer.echo(f"{_word(finding)}  ", nl=False)
            print_text(f"{finding.item:{width}}  {finding.text}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(2)


def _word(finding: Finding) -> str:
    if not finding.good:
        return typer.style("WRONG", fg="red", bold=True)
    return typer.style("warn ", fg="yellow") if finding.warning else typer.style("ok   ", fg="green")


def _findings(config: Path, files: list[Path], *, probe: bool, probe_user: str) -> Iterator[Finding]:
    settings, problem = None, ""
    try:
        settings = load_settings(config)
    except Dl2dError as error:
        problem = str(error)
    not_ours = _why_only_files(config, settings) if files and not probe else ""
    closed = None if files or probe else _closed(config, settings, problem)
    if closed is not None:
        yield closed
    elif not_ours:
        yield Finding("configuration", True, not_ours)
    else:
        yield from _plugins()
        if settings is None:
            yield Finding("configuration", False, problem)
        else:
            yield Finding("configuration", True, f"{config}")
            yield from _of_settings(settings)
            yield from _of_state(settings, of_others=probe)
            if probe:
                yield from probe_findings(settings, probe_user)
    rules = settings.jobs.rules if settings else RequestRules()
    nodes = _nodes(settings) if settings else ()
    for file in files:
        yield from _job_file(file, rules, nodes)


def _closed(config: Path, settings: Settings | None, problem: str) -> Finding | None:
    """What keeps this account from checking the daemon, if it is another's; None if nothing does."""
    hint = "to check a job, name its file: dl2d check train.sh"
    if settings is None:
        return Finding("configuration", False, f"{problem}; {hint}") if os.geteuid() and is_hidden(config) else None
    closed = folder_problem(settings.state_dir)
    return Finding("state_dir", False, f"{closed}; {hint}") if closed.endswith(AS_ACCOUNT) else None


def _why_only_files(config: Path, settings: Settings | None) -> str:
    """Why nothing but job files is checked: the daemon is of another account. Empty if it is not."""
    if settings is None:
        text = f"{config} is not readable by uid {os.getuid()}: files are checked without the site's models and limits"
        return text if is_hidden(config) else ""
    place = next(folder for folder in (settings.state_dir, *settings.state_dir.parents) if os.path.exists(folder))  # noqa: PTH110 - Path.exists raises where a folder above may not be looked into
    if os.access(place, os.W_OK | os.X_OK):
        return ""
    return f"{config}; the daemon is not checked, since {settings.state_dir} does not belong to uid {os.getuid()}"


def _plugins() -> Iterator[Finding]:
    for group in (MANAGERS, POLICIES, PLACEMENTS):
        found = sorted(entry_points(group=group), key=lambda point: point.name)
        broken = False
        for point in found:
            try:
                point.load()
            except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way; which one is what is asked
                broken = True
                problem = f"{type(error).__name__}: {error}"
                text = f"{point.name} ({point.value}) cannot be loaded ({problem}); repair or uninstall it"
                yield Finding(group, False, text)
        if not found:
            yield Finding(group, False, "none is installed; install dl2d again")
        elif not broken:
            yield Finding(group, True, ", ".join(point.name for point in found))


def _of_settings(settings: Settings) -> Iterator[Finding]:
    words = MODE_WORDS.get(settings.mode, "dl2d decides, starts and stops tasks")
    yield Finding("mode", True, f"{settings.mode}: {words}")
    if settings.mode is Mode.CANARY:
        yield _canary(settings)
    for key, group, name in (
        ("policy.name", POLICIES, settings.policy.name),
        ("policy.fallback", POLICIES, settings.policy.fallback),
        ("placement", PLACEMENTS, settings.placement),
        ("resource_manager.name", MANAGERS, settings.resource_manager.name),
    ):
        installed = sorted(entry_points(group=group).names)
        good = name in installed
        yield Finding(key, good, name if good else f"{name!r} is not installed; installed are {', '.join(installed)}")
    if settings.policy.name in entry_points(group=POLICIES).names:
        yield from _policy(settings)
    if settings.policy.fallback in entry_points(group=POLICIES).names:
        yield from _fallback(settings)
    yield from _manager(settings)


def _of_state(settings: Settings, *, of_others: bool) -> Iterator[Finding]:
    """The daemon's files, and what runs at its address; with ``of_others``, only files that the caller may read."""
    folder = settings.state_dir
    if of_others and folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is not checked: it belongs to the daemon's account; `dl2d check` alone checks it"
        yield Finding("state_dir", True, text)
    else:
        problem = folder_problem(folder)
        yield Finding("state_dir", not problem, problem or str(folder))
        yield _store(settings)
        yield _secret(settings)
        if problem := unusable_certificate(settings):
            yield Finding("api.certificate", False, problem.removeprefix("api.certificate="))
    yield from _daemon(settings)


def _canary(settings: Settings) -> Finding:
    """The canary that is in force in the store."""
    try:
        if schema_version.current(settings.store_url) != schema_version.head():
            return Finding("canary", True, "the first `dl2d run` begins it")
        with open_store(settings) as store:
            canary = newest_canary(store, settings)
    except Dl2dError as error:
        return Finding("canary", False, str(error))
    if canary is None:
        return Finding("canary", True, "begins when the daemon reads this configuration")
    return Finding("canary", canary[0].state is not CanaryState.WITHDRAWN, canary_sentence(*canary))


def _policy(settings: Settings) -> Iterator[Finding]:
    """Whether the policy can be made as the configuration says, and whether the live version of it can be read."""
    item = "policy.checkpoint" if settings.policy.checkpoint else "policy.settings"
    live = _from_store(settings, lambda store: store.registry.live(settings.policy.name))
    named = None
    try:
        named = configured_checkpoint(settings)
        if named is not None and (refused := _gate_problem(settings, named)):
            yield Finding(item, False, refused.removeprefix(f"{item}: "))
        elif named is not None or live is None:
            policy = load_policy(settings.policy.name, given=factory_arguments(settings, named))
            problem = _start_problem(settings, policy)
            if problem or named is not None or settings.policy.settings:
                yield Finding(item, not problem, f"{policy.name} version {policy.version} {problem}".rstrip())
    except Dl2dError as error:
        yield Finding(item, False, str(error).removeprefix(f"{item}: "))
    if live is not None:
        yield _live_version(settings, live, named)
    for checkpoint in (named, _from_store(settings, lambda store: _live_checkpoint(store, settings, named))):
        if warning := slot_length_warning(settings, checkpoint):
            yield Finding("schedule.slot_seconds", True, warning, warning=True)
            break
    try:
        check_learning(settings)
    except Dl2dError as error:
        yield Finding("learning.enabled", False, str(error).removeprefix("learning.enabled: "))
    if settings.learning.enabled and settings.policy.name == "dl2-original" and find_spec("torch") is None:
        yield Finding("learning.enabled", True, str(MissingExtraError("torch", "train", "the learner")), warning=True)
    if not settings.mode.acts or takes_checkpoint(settings.policy.name):
        for key in settings.kept_too_short:
            warning = (
                f"less than learning.days={settings.learning.days}, and older days are not learned from or compared "
                "on: `dl2d policy promote` and `dl2d shadow` say how many are missing"
            )
            yield Finding(key, True, warning, warning=True)


def _fallback(settings: Settings) -> Iterator[Finding]:
    """Why the fallback policy cannot be loaded; nothing if it can."""
    try:
        load_policy(settings.policy.fallback, "policy.fallback")
    except Dl2dError as error:
        yield Finding("policy.fallback", False, str(error))


def _live_checkpoint(store: SqlStore, settings: Settings, named: Checkpoint | None) -> Checkpoint | None:
    live = store.registry.live(settings.policy.name)
    return None if live is None else live_checkpoint(live, named)


def _live_version(settings: Settings, live: Version, named: Checkpoint | None) -> Finding:
    try:
        checkpoint = live_checkpoint(live, named)
    except Dl2dError as error:
        text = (
            f"{live.policy} version {live.digest[:DIGITS]} cannot be used, so the fallback decides: {error}; {REPAIR}"
        )
        return Finding("live version", False, text)
    try:
        policy = load_policy(settings.policy.name, given=factory_arguments(settings, checkpoint))
    except Dl2dError as error:
        item = "policy.settings" if str(error).startswith("policy.settings") else "live version"
        return Finding(item, False, str(error).removeprefix(f"{item}: "))
    problem = _start_problem(settings, policy)
    said = f"{policy.name} version {policy.version}"
    return Finding("live version", not problem, f"{said} {problem}" if problem else f"{said}, {live.origin}")


def _gate_problem(settings: Settings, named: Checkpoint) -> str:
    """Why the daemon would refuse the configured checkpoint in mode live; empty if it would not, or nobody knows."""
    return _from_store(settings, lambda store: gate_problem(settings, store, named)) or ""


def _start_problem(settings: Settings, policy: Policy) -> str:
    """What is wrong with how a policy starts jobs on an idle cluster like this site's; empty for nothing."""
    try:
        placement = load_placement(settings.placement)
    except Dl2dError:  # another finding
        return ""
    nodes, requests = _from_store(settings, nodes_and_requests) or (_nodes(settings), [])
    return start_check(policy, placement, nodes, requests).problem


def _from_store(settings: Settings, read: Callable[[SqlStore], T]) -> T | None:
    """What is read from the store; None where there is none, or it cannot be read, which is another finding."""
    with suppress(Dl2dError), store_if_current(settings) as store:
        return None if store is None else read(store)
    return None


def _manager(settings: Settings) -> Iterator[Finding]:
    name = settings.resource_manager.name
    item = f"resource_manager.{name}"
    try:
        match name:
            case "local":
                local = LocalSettings.parse(manager_settings(settings))
                with suppress(OSError):  # it is not there yet, or of another account
                    check_private(local.state_dir)
                nodes = local.nodes
                some = "; ".join(f"{node.name} {node.capacity}" for node in nodes[:_MAX_NODES])
                more = " ..." if len(nodes) > _MAX_NODES else ""
                yield Finding(item, True, f"{counted(len(nodes), 'node')}: {some}{more}")
            case "slurm":
                parsed = SlurmSettings.parse(manager_settings(settings))
                yield Finding(item, True, "settings are valid")
                yield from _watched(settings, f"{item}.watch", parsed.watch)
                if problem := munge_socket_problem(parsed):
                    yield Finding(f"{item}.munge_socket", False, problem)
                yield from map(_advised, unsuitable_options_advice(parsed))
                backend, why = chosen_backend(parsed, os.geteuid())
                yield Finding("slurm backend", True, f"{backend}: {why}")
                missing = [command for command in _SLURM_COMMANDS if shutil.which(command) is None]
                text = f"not in PATH: {', '.join(missing)}; install them where the daemon runs"
                yield Finding("slurm commands", not missing, text if missing else "all are in PATH")
                if not missing:
                    yield from (answers := list(manager_answers(settings)))
                    if all(finding.good for finding in answers):
                        yield from map(_advised, configuration_advice(parsed, os.environ))
            case "yarn":
                cluster = YarnSettings.parse(manager_settings(settings))
                yield Finding(item, True, "settings are valid")
                yield from _watched(settings, f"{item}.watch", cluster.watch)
                yield from (Finding(*found) for found in check_cluster(cluster))
            case _:
                yield Finding(item, True, "its plug-in checks it when the daemon starts")
    except Dl2dError as error:
        yield Finding(item, False, str(error))


def _advised(advice: Advice) -> Finding:
    return Finding(advice.item, not advice.wrong, advice.text, warning=not advice.wrong)


def _watched(settings: Settings, item: str, rules: Sequence[StaticJobRule]) -> Iterator[Finding]:
    """Whether jobs of users who know nothing of dl2d are recorded as what the site calls them."""
    models = settings.jobs.models
    unknown = sorted({rule.model for rule in rules} - set(models)) if models else []
    if unknown:
        yield Finding(item, False, f"jobs.models lacks {', '.join(unknown)}; add it there")
    elif not settings.mode.acts:
        text = f"rules: {len(rules)}" if rules else "no rules: only jobs that register are recorded"
        yield Finding(item, True, text)


def _store(settings: Settings) -> Finding:
    try:
        now, head = schema_version.current(settings.store_url), schema_version.head()
    except Dl2dError as error:
        return Finding("store", False, str(error))
    if now == head:
        return Finding("store", True, f"schema {now}, {_store_size(settings)}")
    if now is None and not settings.store.url:
        text = f"{settings.state_dir}/dl2d.sqlite does not exist yet; the first `dl2d run` creates it"
        return Finding("store", True, text)
    said = "is empty" if now is None else f"has schema {now}"
    return Finding("store", False, f"{said}, but this version of dl2d needs {head}; run `dl2d db upgrade`")


def _store_size(settings: Settings) -> str:
    """Size of the store, and where it is a file the room on its disk."""
    place = StoreLocation.parse(settings.store_url)
    try:
        with closing(Database(place)) as database:
            size = filesize.decimal(database.size())
    except Dl2dError:  # another finding
        return "size unknown"
    return (
        f"{size}; {filesize.decimal(shutil.disk_usage(place.file.parent).free)} free on its disk"
        if place.file
        else size
    )


def _secret(settings: Settings) -> Finding:
    path = settings.secret_path
    try:
        if not path.exists():
            return Finding("secret", True, f"{path} does not exist yet; the first `dl2d run` creates it")
        load_credentials(path, create=False)
    except OSError as error:
        return Finding("secret", False, f"cannot read {path}: {error.strerror}: {AS_ACCOUNT}")
    except Dl2dError as error:
        return Finding("secret", False, str(error))
    return Finding("secret", True, f"{path}, readable by its owner alone")


def _daemon(settings: Settings) -> Iterator[Finding]:
    """What runs at the daemon's address and, if nothing does, whether a daemon could start there."""
    health = daemon_health(settings, _ANSWER_SECONDS)
    said = health.text.removeprefix("; ")
    unchecked = not health.runs and not health.problems
    yield Finding("daemon", not health.problems, f"not checked: {said}" if unchecked else said)
    if not health.runs and not health.blocked:
        problem = address_problem(settings)
        yield Finding("api", not problem, problem or f"{settings.api.host}, port {settings.api.port or 'any'}")
    if settings.resource_manager.name == "slurm" or settings.api.address_file:
        yield from jobs_find_daemon(settings, runs=health.runs)


def _nodes(settings: Settings) -> tuple[Node, ...]:
    """Nodes that the configuration declares; none where only the resource manager knows them."""
    if settings.resource_manager.name != "local":
        return ()
    try:
        return tuple(Node(each.name, each.capacity) for each in LocalSettings.parse(manager_settings(settings)).nodes)
    except Dl2dError:
        return ()


def _job_file(path: Path, rules: RequestRules, nodes: tuple[Node, ...]) -> Iterator[Finding]:
    said: tuple[str, ...] = ()
    try:
        if is_batch_script(path):
            request, script = read_batch_script(path, rules), read_bounded(path)
            given = options_of_script(script)
            refuse_options(given)
            said = remarks(given)
        else:
            request = JobFile.read(path, rules).checked
        check_feasible(request, RmListing(0.0, nodes, ()))
    except Dl2dError as error:
        yield Finding(str(path), False, str(error).removeprefix(f"{path}: "))
        return
    bounds = f"{request.min_workers} to {request.max_workers} workers, {request.min_ps} to {request.max_ps} PSs"
    yield Finding(str(path), True, f"{request.name}: {request.model}, {request.epochs:g} epochs, {bounds}")
    for line in said:
        yield Finding(str(path), True, line)
