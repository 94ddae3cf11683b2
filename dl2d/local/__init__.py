"""The resource manager of a single machine: tasks are real processes on nodes that the config declares."""
