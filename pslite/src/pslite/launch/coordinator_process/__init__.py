"""The process that the user submits: it starts and restarts the job's coordinator, and starts tasks on this machine."""
