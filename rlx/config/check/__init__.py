"""The rules that a configuration must obey on a machine."""
