"""Many simulated clusters stepped at once, as arrays: for learning, and for the environments."""
