"""Boundary mode: a layer keeps its inputs and is recomputed when backward reaches it."""
