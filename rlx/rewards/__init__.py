"""Reward functions, built in and the user's own, and who calls them."""
