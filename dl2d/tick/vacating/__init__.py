"""Claims: nodes and limits that elastic jobs give up so that waiting jobs of others start."""
