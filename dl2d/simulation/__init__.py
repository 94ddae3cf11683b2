"""Simulated clusters: workloads, speed models and profiles of models. Imports core alone."""

from __future__ import annotations
