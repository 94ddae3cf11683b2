"""Static runs, to compare with: the same training with one worker and one parameter server that never change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from dl2d.cli.demo.script import Act

_DIGEST = re.compile(r"\bdigest ([0-9a-f]{64})\b")
_END_SECONDS = 10.0
#: Static runs are in no hurry; the elastic ones go first.
_NICENESS = 10


class References:
    """Static runs of acts, as processes. As a context they are ended with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self._runs.values():
            if run.poll() is None:
                run.terminate()
        for run in self._runs.values():
            try:
                run.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()

    def start(self, act: Act) -> bool:
        """Begin an act's static run, unless it has begun before. It does not pause: that changes no weight."""
        if act.name in self._runs:
            return False
        command = [
            sys.executable, "-m", "pslite.run", "--workers", "1", "--servers", "1", "--", *act.command(pause=0.0)
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DL2_")}
        with self._output(act).open("wb") as output:
            self._runs[act.name] = subprocess.Popen(
                ["nice", "-n", str(_NICENESS), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return True

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the acts whose static runs have not ended."""
        return tuple(name for name, run in self._runs.items() if run.poll() is None)

    def digest(self, act: Act) -> str:
        """Digest of the final weights; "" where the run failed or has not ended."""
        run = self._runs.get(act.name)
        if run is None or run.poll() != 0:
            return ""
        found = _DIGEST.findall(self.said(act))
        return found[-1] if found else ""

    def said(self, act: Act) -> str:
        """What the run printed."""
        path = self._output(act)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _output(self, act: Act) -> Path:
        return self._folder / f"static-{act.name}.log"
