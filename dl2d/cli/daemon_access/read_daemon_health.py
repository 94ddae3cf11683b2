"""Health of the daemon as commands beside it see it: whether it runs, its last good tick, and its last error."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from dataclasses import asdict, dataclass

import httpx2

from dl2d.cli.daemon_access.job_api_client import client_of_daemon, daemon_accounts, daemon_trust, daemon_url
from dl2d.cli.output import duration
from dl2d.config.settings import Settings
from dl2d.core.errors import Dl2dError
from dl2d.daemon.key_and_address_files import load_credentials

#: Fields that are as in the daemon's answer.
_AS_SAID = (
    "last_tick_seconds", "last_error_seconds", "listing_seconds", "waiting", "last_error", "own", "cluster",
)  # fmt: skip
#: What ``--json`` leaves out.
_NOT_SHOWN = ("blocked", "own", "cluster")


@dataclass(frozen=True, slots=True)
class DaemonHealth:
    """What a daemon says of itself."""

    #: Whether it answers, and as the daemon of these settings.
    runs: bool
    #: One sentence for each thing that is wrong.
    problems: tuple[str, ...] = ()
    #: Version, address and slot; of one that does not run, that it does not.
    description: str = ""
    #: Seconds since its last good tick, and since its last failed one; None for none yet.
    last_tick_seconds: float | None = None
    last_error_seconds: float | None = None
    #: Age of the resource manager's listing from which the last good tick decided; None for none yet.
    listing_seconds: float | None = None
    #: What its ticks wait for, if that is no fault; only the daemon's account is told.
    waiting: str = ""
    #: Why that one failed; only the daemon's account is told.
    last_error: str = ""
    #: Whether something else has its port, so that it could not start.
    blocked: bool = False
    #: Whether it takes the credential as that of its own account, and the name of its cluster.
    own: bool = True
    cluster: str = ""

    @property
    def text(self) -> str:
        """Everything in one line."""
        parts = [self.description]
        if self.runs:
            last = self.last_tick_seconds
            parts.append("no good tick yet" if last is None else f"last good tick {duration(last)} ago")
            parts += [] if self.listing_seconds is None else [f"listing {duration(self.listing_seconds)} old"]
        parts += [f"waiting: {self.waiting}"] if self.waiting else []
        parts += self.problems
        if self.last_error and self.last_error_seconds is not None:
            parts.append(f"last error {duration(self.last_error_seconds)} ago: {self.last_error}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, object]:
        """What ``--json`` shows of it."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_SHOWN}


def daemon_health(settings: Settings, seconds: float) -> DaemonHealth:
    """Ask the daemon, for at most so many seconds."""
    try:
        url, trust = daemon_url(settings), daemon_trust(settings)
    except Dl2dError as error:
        return DaemonHealth(runs=False, description=str(error))
    try:
        credential = load_credentials(settings.secret_path, create=False).for_submission()
    except (OSError, Dl2dError):
        credential = ""  # of another account, or not made yet
    # Whoever may not read the key may not see whose it is either: of a good daemon the account is not known then.
    answer = ask_health(url, trust, credential, seconds, daemon_accounts(settings) if credential else None)
    if answer.own or not _knows_own_key(settings, credential):
        return answer
    problem = (
        f"the daemon at {url} (cluster {answer.cluster}) belongs to another state_dir than "
        f"{settings.state_dir}; set another api.port, or stop that daemon"
    )
    return DaemonHealth(runs=False, problems=(problem,), blocked=True)


def ask_health(
    url: str,
    trust: ssl.SSLContext | bool,  # noqa: FBT001 - as httpx has it
    credential: str,
    seconds: float,
    accounts: Collection[int] | None,
) -> DaemonHealth:
    """Ask the daemon at a URL, for at most so many seconds.

    ``credential`` is that of its account, or empty; ``accounts`` are those to which it may belong without TLS,
    None for any.
    """
    try:
        with client_of_daemon(trust, seconds, accounts) as client:
            answer = client.get(f"{url}/v1/health", headers={"Authorization": f"Bearer {credential or 'none'}"})
        content = answer.json()
        if "error" in content:
            error = str(content["error"])
            return DaemonHealth(runs=True, problems=(error,), description=f"the daemon runs at {url}")
        return DaemonHealth(
            runs=True,
            problems=tuple(map(str, content.get("problems", ()))),
            description=f"version {content['version']} runs at {url}, "
            + ("no slot yet" if content["slot"] is None else f"slot {content['slot']}"),
            **{name: content[name] for name in _AS_SAID if name in content},
        )
    except httpx2.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" not in str(error):
            return DaemonHealth(runs=False, description=f"no daemon answers at {url}")
        problem = (
            f"the certificate at {url} is refused ({error}): if api.certificate was replaced, restart the daemon; if "
            "it has expired, replace it first"
        )
        return DaemonHealth(runs=False, problems=(problem,), blocked=True)
    except httpx2.TransportError as error:
        problem = (
            f"{url} gives no valid answer: {error or type(error).__name__}; if another program or another daemon has "
            "this port, set another api.port"
        )
        return DaemonHealth(runs=False, problems=(problem,), blocked=True)
    except (ValueError, KeyError, TypeError):
        problem = f"another program listens at {url}; set another api.port, or end that program"
        return DaemonHealth(runs=False, problems=(problem,), blocked=True)


def _knows_own_key(settings: Settings, credential: str) -> bool:
    """Whether a daemon that refuses this key is another one: the key was read, or none was made yet."""
    try:
        return bool(credential) or not settings.secret_path.exists()
    except OSError:
        return False
