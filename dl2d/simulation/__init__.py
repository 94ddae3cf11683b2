"""Simulated clusters: workloads, speeds, replay of the tick in virtual time, and many clusters as arrays."""
