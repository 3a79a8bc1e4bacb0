"""Samplers behind one protocol: requests in, completions out, one way to update weights."""
