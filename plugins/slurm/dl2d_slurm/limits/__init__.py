"""How far jobs may grow: limits of associations and QOS, and those learned from the reasons why jobs wait."""
