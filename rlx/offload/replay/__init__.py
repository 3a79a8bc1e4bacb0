"""Cached ops: operations whose results are kept, so that recomputation does not repeat them."""
