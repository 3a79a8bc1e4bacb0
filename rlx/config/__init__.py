"""The configuration: a typed tree, its composition, its rules, and a memory forecast."""
