"""What a run will hold in memory, from the configuration and the shapes of its models, and which settings would fit."""
