"""Forecast a run's memory from its configuration and its models' shapes, and find settings that fit."""
