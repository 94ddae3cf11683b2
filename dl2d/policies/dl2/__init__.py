"""The default learned policy: size steps along each job's Pareto frontier, in the order of learned scores."""
