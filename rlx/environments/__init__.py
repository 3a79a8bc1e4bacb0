"""Conversations of several turns: environments, their tools and the processes that they live in."""
