"""What a job is: its specification, plans, blocks, shards and schedules; values and pure functions, no I/O."""
