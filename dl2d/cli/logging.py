"""How the log is written: lines for people on a terminal, JSON for everything else."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog

from dl2d.config.settings import LogSettings
from pslite.job.printable_text import printable

#: Parts of an event that have several lines.
_LINES = ("exception", "stack")


def _console(**options: Any) -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback, **options)


def escape(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Processor that escapes what a terminal would act on: texts in the log may come from the network."""
    return {name: _escaped(value, keep="\n\t" if name in _LINES else "") for name, value in event.items()}


def _escaped(value: object, keep: str) -> object:
    if isinstance(value, str):
        return printable(value, keep=keep)
    if isinstance(value, list | tuple):
        return [_escaped(each, keep) for each in value]
    return value


def log_warnings_only() -> None:
    """For commands that print results: what goes wrong beside them is told on standard error, the rest nowhere."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            escape,
            _console(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Looked up at each line, so that a stream which was put in its place later is used.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


class _LossyStream:
    """A text stream that drops what cannot be written: a full disk, or a reader that has ended, must end no tick."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(settings: LogSettings) -> None:
    """Set structlog and the standard library's loggers up to write to standard error."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer = structlog.processors.JSONRenderer() if as_json else _console()
    last: list[structlog.typing.Processor] = [structlog.processors.format_exc_info, escape, renderer]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _LossyStream(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    # It warns whenever an early tick meets the regular one; dl2d's own log says how long ticks take.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
