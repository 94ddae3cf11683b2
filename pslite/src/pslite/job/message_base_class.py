"""Base of the records that processes of a job send to each other."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class WireRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen record that is validated where it is decoded, and refused if it has fields that are not known there."""
