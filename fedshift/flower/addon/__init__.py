"""Additions to an existing Flower app: a strategy wrapper and client mods. Experiments are not known here."""
