"""The command line."""

from fedshift.cli.main import app

__all__ = ["app"]
