"""Training speed in the simulator: models, profiles of common networks, and what realism does to a speed."""
