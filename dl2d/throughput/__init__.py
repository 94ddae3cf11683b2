"""Models of training speed and of remaining work, from what running jobs showed."""
