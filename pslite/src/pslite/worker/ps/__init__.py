"""A worker whose model lies on parameter servers."""
