"""The configuration: a typed tree, how it is composed, and what it must obey."""
