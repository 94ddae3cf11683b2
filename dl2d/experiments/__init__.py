"""Named, versioned comparisons: policies x workloads x seeds, run in parallel, with a report that can be run again."""

from __future__ import annotations
