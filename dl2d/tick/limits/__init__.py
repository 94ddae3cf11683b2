"""Limits on what jobs may hold and on how often they are resized, and the guard that applies them to a decision."""
