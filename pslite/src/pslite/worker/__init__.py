"""A worker of a job: the session that adapters program against, its coordinator connection, and both ways to train."""
