"""The daemon: its loop, HTTP API, models and health."""
