"""The processes beside a task: they start it, measure what it uses, and report how it ended."""
