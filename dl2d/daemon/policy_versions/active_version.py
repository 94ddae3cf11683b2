"""The active version of the policy: the one that the configuration names, or the registry's live version."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import structlog

from dl2d.config.settings import Settings
from dl2d.core.cluster import Node, Snapshot
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import CheckpointError, ConfigError, Dl2dError, LiveVersionChanged, RegistryError
from dl2d.core.jobs import JobRequest
from dl2d.core.policy import Policy
from dl2d.core.policy_registry import Version, VersionState
from dl2d.plugins import FactoryArguments, load_placement, load_policy, takes_checkpoint
from dl2d.policies.common.checkpoint import DIGITS, Checkpoint, checkpoint_of, read_checkpoint, write_checkpoint
from dl2d.policies.common.training_input_ranges import out_of_range
from dl2d.tick.policy_check.policy_failures import SetAside
from dl2d.tick.policy_check.policy_starts_jobs_check import start_check

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore
    from dl2d.store.tables.policy_versions import SqlRegistry

log = structlog.get_logger()

_BY = "daemon"
#: The policies that the learner trains.
_LEARN = ("dl2", "dl2-original")
#: How many times longer or shorter than in training an interval may be without a warning.
_SLOT_FACTOR = 2.0
#: What to do about a live version that cannot be read.
REPAIR = "restore its folder and reload, or make another version live (dl2d policy promote, rollback)"
#: Maximum number of jobs of a store whose requests are taken, newest first.
_MAX_STORED_JOBS = 200
_DAY_SECONDS = 86_400.0

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ActiveVersion:
    """The policy that decides.

    Of a policy that learns, it is the live version in the registry; where none is live, the one that comes with dl2d,
    which is then registered as live, so that what decided can always be found again. A checkpoint that the
    configuration names and that never was live (``is_candidate``) decides instead in every mode but live, if it passes
    the start check (``policy_starts_jobs_check``). In mode live it has to be promoted first, unless nothing
    was ever recorded that it could be compared on. Where the live version cannot be read, the fallback decides
    (``set_aside``), and no other version does: none is known to be as good. At a reload, the weights that ``running``
    has in memory are used if they are the live version's.

    Raises
    ------
    ConfigError, PluginError
        The configuration names an unknown policy, or a checkpoint that cannot be read, fails the start check, or has
        not been promoted. The latter not at the start of the daemon if another version is live: that one decides.
    """

    def __init__(
        self,
        settings: Settings,
        store: SqlStore,
        clock: Callable[[], float],
        *,
        starting: bool = False,
        running: Policy | None = None,
    ) -> None:
        self._settings, self._registry, self._clock = settings, store.registry, clock
        registry = store.registry
        self._name = settings.policy.name
        self.learns = takes_checkpoint(self._name)
        check_learning(settings)
        #: Digest of the active version, and of a live version that could not be read, which was logged.
        self._digest, self._broken = "", ""
        #: Digest of the live version in whose place the configured one decides.
        self._passed_over = ""
        #: The live version, where it could not be read at the start (``policy`` is the fallback then), or where it
        #: failed and none can take its place.
        self.set_aside: SetAside | None = None
        named = configured_checkpoint(settings)
        live = registry.live(self._name) if self.learns else None
        candidate = named is not None and is_candidate(named, registry)
        problem = gate_problem(settings, store, named)
        if problem and (live is None or not starting):
            raise ConfigError(problem)
        if problem:
            log.error("the configured checkpoint is not used; the live policy version decides", problem=problem)
            named, candidate = None, False
        self.policy: Policy
        if live is not None and not candidate:
            self.policy = self._begin_with(live, named, checkpoint_of(running))
            return
        self.policy = self._made(named)
        if candidate:
            started = start_check(self.policy, load_placement(settings.placement), *nodes_and_requests(store))
            if started.problem:
                raise ConfigError(
                    f"policy.checkpoint: {self._name} version {self.policy.version} {started.problem}; name another, "
                    "or promote it with `dl2d policy promote --force`"
                )
            self._passed_over = "" if live is None else live.digest
        if candidate or (self.learns and live is None):
            self._register(named)

    def refreshed(self) -> Policy | None:
        """The policy of another version that has become live since; None where there is none that can be used.

        Never raises: what is wrong is logged and recorded as a remark on the version, and the active version stays. A
        live version that cannot be read is tried again at each call, and logged once.
        """
        if not self.learns:
            return None
        try:
            live = self._registry.live(self._name)
        except Dl2dError as error:
            log.warning("cannot look up the live policy version", error=str(error))
            return None
        if live is None or live.digest in (self._digest, self._passed_over):
            self._broken = ""
            return None
        if (found := self._take(live)) is None:
            return None
        self.policy, self._passed_over, self.set_aside = found, "", None
        log.info("policy version changed", policy=self._name, version=live.digest[:DIGITS], origin=live.origin)
        return found

    def out_of_range(self, snapshot: Snapshot) -> str:
        """Which statistic of a snapshot is out of the range of the active version's training; empty if none is."""
        checkpoint = checkpoint_of(self.policy)
        return "" if checkpoint is None else out_of_range(snapshot, checkpoint.training)

    def withdraw(self, reason: str) -> bool:
        """Make the version live again that the active one replaced, or set the active one aside if there is none.

        Returns whether one of the two was done, which is logged and recorded; never raises. What is set aside is not
        asked any more until another version is live or the configuration is reloaded.
        """
        try:
            return self._withdraw(reason)
        except Dl2dError as error:
            log.warning("the registry of policies cannot be written", error=str(error))
            return False

    def _withdraw(self, reason: str) -> bool:
        """The same; raises ``StoreError`` if the registry cannot be read or written."""
        if not self.learns or not self._digest or self.set_aside is not None:
            return False
        version = self._digest[:DIGITS]
        live = self._registry.live(self._name)
        if live is None or live.digest != self._digest:
            return False
        try:
            earlier = roll_back(self._registry, self._name, at=self._clock(), by=_BY, reason=reason, live=self._digest)
        except LiveVersionChanged:
            return False
        except RegistryError as error:
            failed = f"failed, and no other version can take its place: {reason}"
            self.set_aside = SetAside(
                self._name, version, f"{failed}; promote another (dl2d policy promote), or reload to try it again"
            )
            log.error(
                "policy version fails, and no other can take its place: it stays live, and the fallback decides; "
                "promote another (dl2d policy promote), or reload to try it again",
                policy=self._name, version=version, reason=reason, error=str(error),
            )  # fmt: skip
            text = f"{reason}; the fallback decides until another is live or the settings are reloaded: {error}"
            self._try(lambda: self._registry.remark(self._name, self._digest, at=self._clock(), by=_BY, text=text))
            return True
        log.error("policy version withdrawn", policy=self._name, version=version, reason=reason,
                  live=earlier.digest[:DIGITS])  # fmt: skip
        return True

    def promote(self, reason: str) -> None:
        """Make the active version live, if it is a registered one that is not. Raises ``Dl2dError`` if it cannot be.

        It cannot be if the live version is no longer the one in whose place this one decided.
        """
        if self.learns and self._digest:
            state, live = VersionState.LIVE, (self._digest, self._passed_over)
            self._registry.change(self._name, self._digest, state, at=self._clock(), by=_BY, reason=reason, live=live)
            self._passed_over = ""

    def reject(self, reason: str) -> None:
        """Withdraw the active version if it is live; a candidate is rejected for what is live.

        Raises ``StoreError`` if the registry cannot be read or written.
        """
        if not self.learns or not self._digest or self._withdraw(reason):
            return
        live = self._registry.live(self._name)
        if live is None or live.digest != self._digest:
            state = VersionState.REJECTED
            self._registry.change(self._name, self._digest, state, at=self._clock(), by=_BY, reason=reason)
            self._passed_over = ""

    def _begin_with(self, live: Version, *copies: Checkpoint | None) -> Policy:
        """The live version's policy; the fallback if it cannot be used. Raises ``ConfigError`` for wrong settings."""
        try:
            checkpoint = live_checkpoint(live, *copies)
        except Exception as error:  # noqa: BLE001 - a checkpoint is data from outside; the cluster goes on whatever it does
            self._tell_broken(live, error, "the fallback decides")
            # Users may read this, so it does not name the folder.
            reason = f"cannot be used (`dl2d check` and the daemon's log say why); {REPAIR}"
            self.set_aside = SetAside(self._name, live.digest[:DIGITS], reason)
            return load_policy(self._settings.policy.fallback, "policy.fallback")
        self._digest = live.digest
        return self._made(checkpoint)

    def _take(self, live: Version) -> Policy | None:
        try:
            policy = self._made(read_version(live))
        except Exception as error:  # noqa: BLE001 - as above
            self._tell_broken(live, error, "the version before it stays active")
            return None
        self._digest, self._broken = live.digest, ""
        return policy

    def _tell_broken(self, live: Version, error: Exception, what_decides: str) -> None:
        if live.digest == self._broken:
            return
        self._broken = live.digest
        log.error("policy version cannot be used", policy=self._name, version=live.digest[:DIGITS], error=str(error))
        text = f"cannot be used: {error}; {what_decides}"
        self._try(lambda: self._registry.remark(self._name, live.digest, at=self._clock(), by=_BY, text=text))

    def _made(self, checkpoint: Checkpoint | None) -> Policy:
        return load_policy(self._name, given=factory_arguments(self._settings, checkpoint))

    def _register(self, named: Checkpoint | None) -> None:
        checkpoint = checkpoint_of(self.policy)
        if checkpoint is None:
            return
        self._digest = checkpoint.digest
        origin = "it comes with dl2d" if named is None else f"policy.checkpoint: {self._settings.policy.checkpoint}"

        def begin() -> None:
            at, folder = self._clock(), self._settings.versions_path
            kept = keep_version(checkpoint, folder, self._registry, at=at, origin=origin)
            if named is None or self._settings.mode is Mode.LIVE:
                unchecked = "" if named is None else "; without the gate, since nothing was recorded to compare it on"
                reason = f"begins: {origin}{unchecked}"
                self._registry.change(self._name, kept.digest, VersionState.LIVE, at=at, by=_BY, reason=reason)

        self._try(begin)

    def _try(self, write: Callable[[], object]) -> None:
        """Write to the registry; where it cannot be written, the daemon goes on."""
        try:
            write()
        except Dl2dError as error:
            log.warning("the registry of policies cannot be written", error=str(error))


def roll_back(registry: SqlRegistry, policy: str, *, at: float, by: str, reason: str, live: str = "") -> Version:
    """Make the nearest earlier version live whose checkpoint can be read; others are passed over, with a remark.

    ``live``: see ``SqlRegistry.roll_back``.

    Raises
    ------
    RegistryError
        There is none.
    LiveVersionChanged
        Another version than ``live`` is live.
    """
    earlier = registry.earlier(policy)
    for each in earlier:
        try:
            read_version(each)
        except CheckpointError as error:
            log.error("earlier policy version cannot be used", policy=policy, version=each.digest[:DIGITS],
                      error=str(error))  # fmt: skip
            registry.remark(policy, each.digest, at=at, by=by, text=f"passed over in a rollback: {error}")
        else:
            return registry.roll_back(policy, at=at, by=by, reason=reason, to=each.digest, live=live)
    if earlier:
        raise RegistryError(f"no version of {policy} before the live one can be read ({len(earlier)} were tried)")
    return registry.roll_back(policy, at=at, by=by, reason=reason, live=live)


def is_candidate(named: Checkpoint, registry: SqlRegistry) -> bool:
    """Whether a configured checkpoint was never live, and no version went live since it was registered.

    One that was rejected is still one where no version is live in its place.
    """
    known = next((each for each in registry.versions(named.policy) if each.digest == named.digest), None)
    if known is None:
        return True
    changes = registry.changes(named.policy, limit=1000)
    went_live = (each.at for each in changes if each.after is VersionState.LIVE)
    if known.state is VersionState.REJECTED:
        return registry.live(named.policy) is None
    return known.state is VersionState.CANDIDATE and known.at >= max(went_live, default=known.at)


def gate_problem(settings: Settings, store: SqlStore, named: Checkpoint | None) -> str:
    """Why a configured checkpoint must not decide in mode live; empty if it may, or in another mode.

    It may if nothing was ever recorded, since there is nothing to compare it on.
    """
    if named is None or settings.mode is not Mode.LIVE or not store.last_slot_number():
        return ""
    if not is_candidate(named, store.registry):
        return ""
    return (
        f"policy.checkpoint: {named.policy} version {named.digest[:DIGITS]} has not passed the gate; "
        f"run `dl2d policy promote {settings.policy.checkpoint}`"
    )


def nodes_and_requests(store: SqlStore) -> tuple[Sequence[Node], list[JobRequest]]:
    """The nodes of a site's newest slot, and the requests of the newest jobs in its store, to check a policy with.

    Raises ``StoreError`` if the store cannot be read.
    """
    newest = store.slot(store.last_slot_number())
    requests = [job.request for job in store.jobs(live=False, limit=_MAX_STORED_JOBS)]
    return (() if newest is None else newest.snapshot.nodes), requests


def current_checkpoint(settings: Settings, registry: SqlRegistry, name: str) -> Checkpoint | None:
    """The checkpoint with which a policy decides, or would if in charge; None if a plug-in does not show it.

    As in the daemon it is the live version; where none is live, the configured one; without one, the policy's own.
    In every mode but live, a configured one that is a candidate comes first.

    Raises
    ------
    ConfigError, CheckpointError
        The live one or the configured one cannot be read, or there is none at all.
    Dl2dError
        No policy can be made with the live one.
    """
    is_configured = settings.policy.name == name
    live = registry.live(name)
    named = None
    if is_configured and (live is None or settings.mode is not Mode.LIVE):
        named = configured_checkpoint(settings)
        if named is not None and (live is None or is_candidate(named, registry)):
            return named
    if live is not None:
        return live_checkpoint(live, named)
    return checkpoint_of(load_policy(name))


def live_checkpoint(live: Version, *copies: Checkpoint | None) -> Checkpoint:
    """The checkpoint of the live version. If its folder cannot be read, it is an equal one, if there is one: of
    ``copies`` (such as the one that the configuration names), or that which comes with dl2d.

    Raises
    ------
    CheckpointError
        There is none.
    Dl2dError
        No policy can be made with it.
    """
    try:
        checkpoint = read_version(live)
    except CheckpointError:
        if (copy := _equal(live, copies)) is not None:
            return copy
        with contextlib.suppress(CheckpointError):
            if (copy := _equal(live, [checkpoint_of(load_policy(live.policy))])) is not None:
                return copy
        raise
    load_policy(live.policy, given=FactoryArguments(checkpoint=checkpoint))
    return checkpoint


def _equal(live: Version, copies: Iterable[Checkpoint | None]) -> Checkpoint | None:
    """The first copy that equals the checkpoint of the live version."""
    return next((copy for copy in copies if copy is not None and copy.digest == live.digest), None)


def slot_length_warning(settings: Settings, checkpoint: Checkpoint | None) -> str:
    """Why the site's intervals are too far from those that a network was trained with; empty if they are not.

    Only of the paper's policy: ``dl2`` decides for intervals of any length.
    """
    if checkpoint is None or checkpoint.policy != "dl2-original":
        return ""
    trained, own = checkpoint.settings.get("slot_seconds"), settings.schedule.slot_seconds
    if not isinstance(trained, int | float) or trained <= 0 or 1 / _SLOT_FACTOR <= own / trained <= _SLOT_FACTOR:
        return ""
    return (
        f"{checkpoint.policy} version {checkpoint.digest[:DIGITS]} was trained with intervals of {trained:g} s and may "
        f"decide otherwise with schedule.slot_seconds={own:g}; train it with this length, or set that one"
    )


def check_learning(settings: Settings) -> None:
    """Raise ``ConfigError`` where learning is enabled for a policy that cannot learn from a site."""
    if settings.learning.enabled and settings.policy.name not in _LEARN:
        name = settings.policy.name
        raise ConfigError(
            f"learning.enabled: policy {name!r} does not learn from a site; set policy.name: {' or '.join(_LEARN)}"
        )


def factory_arguments(settings: Settings, checkpoint: Checkpoint | None) -> FactoryArguments:
    """Arguments with which the daemon's policy is made."""
    return FactoryArguments(
        checkpoint=checkpoint, settings=settings.policy.settings, slot_seconds=settings.schedule.slot_seconds
    )


def configured_checkpoint(settings: Settings) -> Checkpoint | None:
    """The checkpoint that the configuration names, None for none. Raises ``ConfigError`` where it cannot be read."""
    place = settings.policy.checkpoint
    if place is None:
        return None
    if not takes_checkpoint(settings.policy.name):
        raise ConfigError(f"policy.checkpoint: policy {settings.policy.name!r} has no checkpoints; leave it empty")
    try:
        return read_checkpoint(place, policy=settings.policy.name)
    except CheckpointError as error:
        raise ConfigError(f"policy.checkpoint: {error}") from error


def read_version(version: Version) -> Checkpoint:
    """The checkpoint of a version. Raises ``CheckpointError`` where it is missing or was changed."""
    checkpoint = read_checkpoint(version.folder, policy=version.policy)
    if checkpoint.digest != version.digest:
        raise CheckpointError(
            f"{version.folder}: is version {checkpoint.digest[:DIGITS]}, not {version.digest[:DIGITS]} as registered"
        )
    return checkpoint


def version_in(folder: Path, checkpoint: Checkpoint, *, at: float, origin: str) -> Version:
    """Copy a checkpoint into the folder of versions, unless it is there; returns its version.

    A copy that is damaged is replaced. Raises ``CheckpointError``.
    """
    place = folder.absolute() / f"{checkpoint.policy}-{checkpoint.digest[:DIGITS]}"
    try:
        present = read_checkpoint(place, policy=checkpoint.policy).digest
    except CheckpointError:
        present = ""
    if present != checkpoint.digest:
        write_checkpoint(checkpoint, place, damaged=True)
    return Version(
        policy=checkpoint.policy,
        digest=checkpoint.digest,
        folder=str(place),
        origin=origin,
        at=at,
        metrics=checkpoint.training,
        **_learned_from(checkpoint.training),
    )


class _Supervised(msgspec.Struct):
    jobs: _Count = 0


class _Training(msgspec.Struct):
    """What the record of a checkpoint's training says of the recorded days that it learned from."""

    days: list[dt.date] = []
    data_from: float | None = None
    data_to: float | None = None
    jobs: _Count = 0
    supervised: _Supervised = msgspec.field(default_factory=_Supervised)


def _learned_from(training: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``Version`` about the recorded days that were learned from; empty where the record does not tell."""
    try:
        found = msgspec.convert(training, _Training)
    except msgspec.ValidationError:
        return {}
    if not found.days:
        return {}
    first, last = (dt.datetime.combine(day, dt.time(), dt.UTC) for day in (min(found.days), max(found.days)))
    return {
        "data_from": first.timestamp() if found.data_from is None else found.data_from,
        "data_to": last.timestamp() + _DAY_SECONDS if found.data_to is None else found.data_to,
        "jobs": found.jobs or found.supervised.jobs,
    }


def keep_version(checkpoint: Checkpoint, folder: Path, registry: SqlRegistry, *, at: float, origin: str) -> Version:
    """Copy a checkpoint into the folder of versions and register it; one that is known is given back as it is.

    Raises
    ------
    CheckpointError
        It cannot be written.
    StoreError
        It cannot be registered.
    """
    return registry.add_version(version_in(folder, checkpoint, at=at, origin=origin))
