"""``dl2d demo``: the command, the jobs it trains, and the picture it draws."""
