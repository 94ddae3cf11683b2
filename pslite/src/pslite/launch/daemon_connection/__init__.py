"""How a job's processes find dl2d's daemon and talk to it: address, credentials, registration, heartbeats."""
