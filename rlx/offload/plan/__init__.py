"""What becomes of each layer: the planner, what it knows of machines and models, and its command."""
