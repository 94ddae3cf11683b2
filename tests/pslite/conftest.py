"""Settings of the tests of pslite."""

from __future__ import annotations

from hypothesis import settings

# the machine may be busy: how long an example takes says nothing
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
