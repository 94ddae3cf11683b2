"""Grants: nodes, and room in limits, that elastic jobs vacate so that waiting foreign jobs start."""
