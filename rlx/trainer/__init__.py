"""The driver: the loop, validation, checkpoints, console, tracking, report."""
