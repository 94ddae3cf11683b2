"""The HTTP API of the daemon, for coordinators and the command line."""
