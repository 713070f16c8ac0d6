"""`python -m fedshift`: the command line."""

from fedshift.cli import app

if __name__ == "__main__":
    app(prog_name="fedshift")
