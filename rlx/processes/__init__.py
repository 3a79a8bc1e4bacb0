"""Processes that run code of a user or a model, with limits. Their owner believes nothing that they send."""
