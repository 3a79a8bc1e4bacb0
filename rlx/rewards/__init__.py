"""Reward functions, built in and the user's own, and the processes that call them."""
