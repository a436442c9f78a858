"""Run `oomb` as `python -m oomb`."""

from oomb.cli.main import app

if __name__ == "__main__":
    app(prog_name="oomb")
