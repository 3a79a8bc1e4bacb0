"""Compute MLPs and norms tile by tile over the positions."""
