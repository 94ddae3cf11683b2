"""What holds for every test."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import httpcore2
import pytest
import structlog
from hypothesis import HealthCheck, settings

# Where the environment forbids to write bytecode, each process that a test starts would compile what it imports anew,
# and each worker of xdist would rewrite all assertions again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several tests run at a time: threads of BLAS and OpenMP would spin while they wait for the processors of others.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A client for whatever URL reads the certificates of all authorities, which takes longer than most calls.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# What runs the tests may ignore signals (nohup, the background of a shell); processes that tests start must not do so.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The machine may be busy: how long an example takes, or its making, says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last lines which tests were skipped and what installs what they lack."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    reasons = Counter(
        each.longrepr[2] for each in reporter.stats.get("skipped", ()) if isinstance(each.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        reporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    if any("not installed" in reason for reason in reasons):
        reporter.write_line("Debian's packages for these tests: sudo make test-deps")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that may take longer than others: else one of them may run alone at the end."""
    usual = float(config.getini("timeout"))

    def limit(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return usual if mark is None else max(mark.args[0], usual)

    items.sort(key=limit, reverse=True)


def pytest_collection_finish() -> None:
    """Leave what collecting made out of garbage collections: they would go through half a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """A command run in this process sets the log up for itself; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
