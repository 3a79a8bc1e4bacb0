"""From the command line to the typed tree."""
