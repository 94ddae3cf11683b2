"""Workloads: the file format, and where jobs come from (files, traces of clusters, generators)."""
