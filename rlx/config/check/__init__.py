"""Rules that a configuration must meet on a machine."""
