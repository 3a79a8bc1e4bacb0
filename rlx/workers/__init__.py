"""Worker processes: the roles they host, each a thin adapter from the configuration to engine or rollout."""
