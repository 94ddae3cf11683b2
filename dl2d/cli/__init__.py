"""The command line: thin commands over daemon and store."""
