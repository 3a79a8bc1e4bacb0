"""Boundary mode: a layer keeps its inputs and runs again when backward comes to it."""
