"""Cached ops: operations whose results are kept, so that a recomputation does not run them again."""
