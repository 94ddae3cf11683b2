"""State of a coordinator: what it knows of the job, and what of that is logged and reported."""
