from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
import structlog

from dl2d.cli.logging import configure_logging, log_warnings_only
from dl2d.config.settings import LogSettings


@pytest.mark.parametrize("form", ["console", "json", "warnings"])
def test_nothing_in_the_log_acts_on_a_terminal(form, capfd):
    if form == "warnings":
        log_warnings_only()
    else:
        configure_logging(LogSettings(format=form))
    log = structlog.get_logger()
    try:
        log.warning("said", words="a\x1b[2J\nfaked line", several=["b\x9b31m"])
        logging.getLogger("other").warning("of a library: %s", "c\x1b]0;title\x07")
        try:
            raise ValueError("d\x1b[A")
        except ValueError:
            log.exception("failed")
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    said = capfd.readouterr().err
    for escaped in ("a\\x1b[2J", "b\\x9b31m", "d\\x1b[A", "ValueError"):
        assert escaped in said.replace("\\\\", "\\")
    # The renderer's own colours are sequences of one form.
    text = said if form != "console" else re.sub("\x1b\\[[0-9;]*m", "", said)
    assert not any(character in text for character in "\x1b\x9b\x07")
    assert "\nfaked" not in text


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_log_that_cannot_be_written_ends_nothing(form, monkeypatch):
    """Its disk is full: a line that raised would end a tick between the start of a task and the record of it."""
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging(LogSettings(format=form))
        try:
            for _ in range(3):
                structlog.get_logger().info("task started", handle="x" * 10_000)
        finally:
            structlog.reset_defaults()
            logging.getLogger().handlers.clear()
            with pytest.raises(OSError, match="No space left"):
                full.close()  # what the stream holds back
