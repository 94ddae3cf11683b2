"""A worker that has the whole model and adds up gradients with the other workers in a process group."""
