"""A forecast of a run's memory from its configuration and the shapes of its models, and settings that would fit."""
