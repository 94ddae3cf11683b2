"""``dl2d check``: configuration, files, addresses, and whether jobs reach the daemon."""
