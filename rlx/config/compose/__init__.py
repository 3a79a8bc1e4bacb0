"""Turn the command line into the typed tree."""
