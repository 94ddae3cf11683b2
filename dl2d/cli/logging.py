"""How the log is written: lines for people on a terminal, JSON for everything else."""

from __future__ import annotations

import logging
import sys

import structlog

from dl2d.config.settings import LogSettings


def log_warnings_only() -> None:
    """For commands that print results: what goes wrong beside them is told on standard error, the rest nowhere."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Looked up at each line, so that a stream which was put in its place later is used.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


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
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[*shared, *([structlog.processors.format_exc_info] if as_json else []), renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    # It warns whenever an early tick meets the regular one; our own log says how long ticks take.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
