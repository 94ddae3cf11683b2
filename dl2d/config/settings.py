"""Settings of the daemon, read from one YAML file, and where files that ship with dl2d lie.

``etc/dl2d.yaml`` documents every key.
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    InstanceOf,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

import dl2d
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import ConfigError, RequestError
from dl2d.core.input_validation import problems_of
from dl2d.core.job_request_parser import MAX_TASKS, RequestRules
from dl2d.core.resources import Resources, parse_resources
from dl2d.core.store import RetentionTimes

_DAY = 86_400.0
DEFAULT_PATH = Path("/etc/dl2d/dl2d.yaml")

#: Types of model that a site knows without adding any.
KNOWN_MODELS = (
    "resnet-50", "vgg-16", "resnext-110", "inception-bn", "seq2seq", "ctc", "dssm", "word-lm", "bert", "gpt-2", "other",
)  # fmt: skip


#: A path; empty for none.
OptionalPath = Annotated[Path | None, BeforeValidator(lambda given: None if given == "" else given)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class StoreSettings(_Section):
    """Where decisions and history are kept."""

    url: str = ""
    progress_seconds: float = Field(default=10.0, ge=0, le=86_400)
    keep_progress_days: float = Field(default=14.0, ge=0, le=36_600)
    keep_decisions_days: float = Field(default=365.0, ge=0, le=36_600)
    keep_slots_days: float = Field(default=365.0, ge=0, le=36_600)
    keep_jobs_days: float = Field(default=730.0, ge=0, le=36_600)

    @property
    def keep(self) -> RetentionTimes:
        """How long what was recorded is kept."""

        def seconds(days: float) -> float:
            return _DAY * days if days else math.inf

        return RetentionTimes(
            progress=seconds(self.keep_progress_days),
            decisions=seconds(self.keep_decisions_days),
            slots=seconds(self.keep_slots_days),
            jobs=seconds(self.keep_jobs_days),
        )


class PolicySettings(_Section):
    """The policy, and the fallback for when it fails."""

    name: str = "dl2"
    checkpoint: OptionalPath = None
    settings: dict[str, StrictBool | FiniteFloat] = Field(default_factory=dict)
    fallback: str = "drf"
    timeout_seconds: float = Field(default=5.0, gt=0, le=3600)
    idle_seconds: float = Field(default=300.0, gt=0, le=86_400)
    max_failures: int = Field(default=5, ge=1, le=1000)


class ScheduleSettings(_Section):
    """How often dl2d ticks, and how long a decision is in force."""

    poll_seconds: float = Field(default=15.0, gt=0, le=3600)
    slot_seconds: float = Field(default=300.0, gt=0, le=86_400)
    seed: int = Field(default=0, ge=0, lt=2**63)


class ApiSettings(_Section):
    """The HTTP API for coordinators and the command line."""

    host: str = "127.0.0.1"
    port: int = Field(default=8910, ge=0, le=65_535)
    advertise: str = ""
    address_file: OptionalPath = None
    certificate: OptionalPath = None
    certificate_key: OptionalPath = None
    heartbeat_seconds: float = Field(default=2.0, gt=0, le=60)
    requests_per_second: float = Field(default=20.0, ge=1, le=10_000)
    connections_per_address: int = Field(default=256, ge=4, le=100_000)
    operators: tuple[str, ...] = ()

    def url(self, host: str, port: int) -> str:
        """Where jobs reach the API that listens on this address and port."""
        if self.advertise:
            return self.advertise
        return self.url_of(socket.getfqdn() if host in ("0.0.0.0", "::") else host, port)  # noqa: S104 - compared, not bound

    def url_of(self, host: str, port: int) -> str:
        """URL of a host and port: ``https`` with a certificate, otherwise ``http``."""
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @model_validator(mode="after")
    def _both_or_neither(self) -> ApiSettings:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("api.certificate, api.certificate_key: set both or neither")
        return self

    @field_validator("advertise")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must be a URL such as http://head:8910, or empty")
        return value.rstrip("/")


class JobSettings(_Section):
    """What jobs may request, and how long dl2d waits for them."""

    models: tuple[str, ...] = KNOWN_MODELS
    max_workers: int = Field(default=16, ge=1, le=MAX_TASKS)
    max_ps: int = Field(default=16, ge=0, le=MAX_TASKS)
    start_seconds: float = Field(default=600.0, gt=0)
    queue_seconds: float = Field(default=180.0, gt=0)
    drain_seconds: float = Field(default=60.0, gt=0)
    end_seconds: float = Field(default=10.0, gt=0)
    unseen_listings: int = Field(default=3, ge=1, le=1000)
    unseen_seconds: float = Field(default=30.0, gt=0)
    silent_seconds: float = Field(default=60.0, gt=0)
    grace_seconds: float = Field(default=10.0, ge=0)
    start_failures: int = Field(default=3, ge=1, le=1000)
    backoff_seconds: float = Field(default=10.0, ge=0, le=600)

    @property
    def rules(self) -> RequestRules:
        """The part that job requests are checked against."""
        return RequestRules(frozenset(self.models), self.max_workers, self.max_ps)


class GuardSettings(_Section):
    """Limits on what a policy may do."""

    per_user: InstanceOf[Resources] = Resources()
    per_account: InstanceOf[Resources] = Resources()
    per_partition: InstanceOf[Resources] = Resources()
    cooldown_up_seconds: float = Field(default=0.0, ge=0)
    cooldown_down_seconds: float = Field(default=0.0, ge=0)
    churn: int = Field(default=0, ge=0)
    hold_back_after_seconds: float = Field(default=86400.0, ge=0)

    @field_validator("per_user", "per_account", "per_partition", mode="before")
    @classmethod
    def _read_resources(cls, value: object, info: ValidationInfo) -> object:
        if value is None or isinstance(value, Resources):
            return value or Resources()
        try:
            limit = parse_resources(value, str(info.field_name))
        except RequestError as error:
            raise ValueError(error.problem) from None
        names = value if isinstance(value, dict) else [part.partition(":")[0].strip() for part in str(value).split(",")]
        for name in names:
            if not limit.get(str(name)):
                raise ValueError(f"{name}: must be more than 0; a resource that is not named has no limit")
        return limit


class CanarySettings(_Section):
    """Which jobs the policy decides on in mode canary, and when that ends."""

    share: float = Field(default=0.1, gt=0, lt=1)
    partition: str = ""
    account: str = ""
    min_jobs: int = Field(default=30, ge=2, le=1_000_000)
    max_days: float = Field(default=14.0, ge=2, le=366)

    @property
    def group_share(self) -> float:
        """The share of all jobs; 0 where a partition or account says which they are."""
        return 0.0 if self.partition or self.account else self.share

    @model_validator(mode="after")
    def _one_group(self) -> CanarySettings:
        if self.partition and self.account:
            raise ValueError("canary.partition, canary.account: set at most one of them")
        return self


class LearningSettings(_Section):
    """Learning from what this site recorded, beside the daemon."""

    enabled: bool = False
    folder: OptionalPath = None
    at: str = Field(default="", pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9])?$")
    every_hours: float = Field(default=24.0, gt=0, le=8760)
    days: int = Field(default=28, ge=2, le=3660)
    minutes: float = Field(default=10.0, gt=0, le=1440)
    limit_minutes: float = Field(default=60.0, gt=0, le=2880)
    gate_min_days: int = Field(default=3, ge=2, le=366)
    gate_min_jobs: int = Field(default=30, ge=1)
    gate_site_margin: float = Field(default=0.02, ge=0, le=1)
    memory_mib: int = Field(default=4096, ge=512)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _ends_before_its_limit(self) -> LearningSettings:
        if self.minutes >= self.limit_minutes:
            raise ValueError(f"learning.limit_minutes: must be more than learning.minutes={self.minutes:g}")
        return self


class ResourceManagerSettings(_Section):
    """The resource manager and its settings; each plug-in checks its own."""

    name: str = "local"
    local: dict[str, Any] = Field(default_factory=dict)
    slurm: dict[str, Any] = Field(default_factory=dict)
    yarn: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="after")
    def _extra_are_sections(self) -> ResourceManagerSettings:
        for key, value in (self.model_extra or {}).items():
            if not isinstance(value, dict):
                raise ValueError(f"{key}: unknown key (the settings of another manager would be a section)")
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings of the manager in charge."""
        section = getattr(self, self.name, None) if self.name in ("local", "slurm", "yarn") else None
        return dict(section if section is not None else (self.model_extra or {}).get(self.name, {}))


class LogSettings(_Section):
    """Format and level of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Settings(BaseSettings):
    """All settings. A variable ``DL2D_<SECTION>__<KEY>`` in the environment goes before the file."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="DL2D_", env_nested_delimiter="__", env_file=None
    )

    state_dir: Path = Path("/var/lib/dl2d")
    mode: Mode = Mode.LIVE
    store: StoreSettings = StoreSettings()
    resource_manager: ResourceManagerSettings = ResourceManagerSettings()
    policy: PolicySettings = PolicySettings()
    placement: str = "load_balance"
    schedule: ScheduleSettings = ScheduleSettings()
    api: ApiSettings = ApiSettings()
    jobs: JobSettings = JobSettings()
    guard: GuardSettings = GuardSettings()
    canary: CanarySettings = CanarySettings()
    learning: LearningSettings = LearningSettings()
    log: LogSettings = LogSettings()

    @field_validator("state_dir")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        """Refuse a relative path, which would be another folder for each working folder."""
        if not value.is_absolute():
            raise ValueError("must be an absolute path such as /var/lib/dl2d")
        return value

    @model_validator(mode="after")
    def _compares_two_policies(self) -> Settings:
        if self.mode is Mode.CANARY and self.policy.name == self.policy.fallback:
            raise ValueError(
                f"policy.fallback: mode canary compares it with policy.name={self.policy.name}; name another policy"
            )
        if self.mode is Mode.CANARY and self.store.keep.jobs < _DAY * self.canary.max_days:
            raise ValueError(f"store.keep_jobs_days: must be at least canary.max_days={self.canary.max_days:g}, or 0")
        return self

    @model_validator(mode="after")
    def _keeps_what_it_learns_from(self) -> Settings:
        if self.learning.enabled and self.kept_too_short:
            raise ValueError(f"{self.kept_too_short[0]}: must be at least learning.days={self.learning.days}, or 0")
        return self

    @model_validator(mode="after")
    def _silence_is_longer_than_a_pause(self) -> Settings:
        if self.jobs.silent_seconds < 3 * self.api.heartbeat_seconds:
            beat = self.api.heartbeat_seconds
            raise ValueError(f"jobs.silent_seconds: must be at least three times api.heartbeat_seconds={beat:g}")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes before the file, so that a test or a unit drop-in can change one key."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings

    @property
    def kept_too_short(self) -> tuple[str, ...]:
        """Settings ``store.keep_*_days`` that are shorter than ``learning.days``."""
        needed, keep = _DAY * self.learning.days, self.store.keep
        names = (name for name in ("decisions", "slots", "jobs") if getattr(keep, name) < needed)
        return tuple(f"store.keep_{name}_days" for name in names)

    @property
    def store_url(self) -> str:
        """The store's URL: as given, or SQLite in the state folder."""
        return self.store.url or f"sqlite:///{self.state_dir / 'dl2d.sqlite'}"

    @property
    def versions_path(self) -> Path:
        """Folder of the versions of learned policies."""
        return self.learning.folder or self.state_dir / "policies"

    @property
    def secret_path(self) -> Path:
        """The daemon's key file."""
        return self.state_dir / "secret"


def load_settings(path: Path) -> Settings:
    """Read and check a configuration file.

    Raises
    ------
    ConfigError
        The file cannot be read, is not YAML, or has unknown keys or bad values; every one is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `dl2d config` prints a documented sample to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # The others are raised for invalid dates and numbers, and for deep nesting.
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(content).__name__}")
    # Settings() takes keyword arguments that begin with an underscore as its own options.
    unknown = [str(key) for key in content if str(key).startswith("_")]
    if unknown:
        raise ConfigError(f"{path}: {'; '.join(f'{key}: unknown key' for key in unknown)}")
    try:
        return Settings(**{str(key): value for key, value in content.items()})
    except ValidationError as error:
        problems = "; ".join(": ".join(filter(None, (_named(key), text))) for key, text in problems_of(error))
        raise ConfigError(f"{path}: {problems}") from None


def _named(key: str) -> str:
    """A key, with the environment variable that overrides the file's value if there is one."""
    variable = f"DL2D_{key.upper().replace('.', '__')}"
    return f"{key} (from {variable})" if variable in os.environ else key


def shipped(name: str) -> Path:
    """Path of a shipped file such as ``etc/dl2d.yaml``. Raises ``ConfigError`` if the installation is not complete."""
    package = Path(dl2d.__file__).parent
    for root in (package, package.parent):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"{name} is not part of this installation of dl2d; install it again")
