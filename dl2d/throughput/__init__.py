"""Models of training speed and of remaining work, fitted to measurements of running jobs."""
