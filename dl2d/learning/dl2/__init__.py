"""Training of policy ``dl2``: search for weights in simulated clusters, or supervised from recorded decisions."""
