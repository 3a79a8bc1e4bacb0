"""MLPs and norms computed tile by tile over the positions."""
