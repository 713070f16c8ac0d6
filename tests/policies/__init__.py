"""Uplink policies."""
