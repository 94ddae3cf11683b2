"""Versions of a learned policy: the active one, candidates, and the process that trains them."""
