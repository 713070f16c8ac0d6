"""Rounds: the training loop, uplinks, the server side, statistics, and the contract of engines."""
