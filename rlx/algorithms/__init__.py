"""Advantages, losses, KL and aggregation: pure functions on tensors, torch only."""
