"""Keeps watch over the driver: passes signals on, starts it again after a failure, leaves nothing behind.

It imports the standard library and psutil only, so that it takes signals from its first moments on.
"""
