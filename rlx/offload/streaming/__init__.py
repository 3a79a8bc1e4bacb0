"""Frozen weights of layers wait in host memory and are fetched one layer ahead."""
