"""Add-on for existing Flower apps: a strategy wrapper and client mods, independent of experiments."""
