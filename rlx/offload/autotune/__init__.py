"""`save="auto"`: layers are profiled in the first passes of each length and follow a plan afterwards."""
