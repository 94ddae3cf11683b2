"""Place: turns a decision into single starts and stops of tasks on nodes."""
