"""Samplers behind one protocol: requests in, completions out, weights through one door."""
