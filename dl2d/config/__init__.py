"""The one configuration file: its schema, and where the files that ship with dl2d lie."""
