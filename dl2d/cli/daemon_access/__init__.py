"""How commands read what the daemon knows: its job API, its database, and whether it runs."""
