"""What a tick observes: nodes, tasks and jobs as the resource manager and the store have them, as one snapshot."""
