"""Words to the service manager (sd_notify(3)): starting, ready, reloading, stopping, alive."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

import structlog

from pslite.job.printable_text import printable

log = structlog.get_logger()


class ServiceManager:
    """Speaks to the socket that systemd names in ``NOTIFY_SOCKET``; without one every word is for nobody."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        limit = environment.get("WATCHDOG_USEC", "")
        meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Seconds within which it wants a sign of life, or None.
        self.watchdog_seconds = int(limit) / 1e6 if limit.isdecimal() and meant else None

    def starting(self, seconds: float) -> None:
        """Start-up may take so many seconds from now on, whatever limit the service has."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}\nSTATUS=starting")

    def ready(self, status: str) -> None:
        """Start-up or a reload is complete."""
        self._send(f"READY=1\nSTATUS={printable(status)}")

    def reloading(self) -> None:
        """The configuration is being read again."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}")

    def stopping(self) -> None:
        """The daemon is shutting down."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def alive(self, status: str) -> None:
        """A sign of life for the watchdog, with one line for ``systemctl status``."""
        self._send(f"WATCHDOG=1\nSTATUS={printable(status)}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.connect(self._address)
                channel.sendall(text.encode())
        except OSError as error:
            log.warning("service manager not reached", error=str(error))
