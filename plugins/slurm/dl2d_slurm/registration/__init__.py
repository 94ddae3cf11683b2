"""Who may register a job, and whether jobs on compute nodes find and reach the daemon to do so."""
