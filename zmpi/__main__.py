"""python -m zmpi: lists the commands."""

import argparse
import ast
from pathlib import Path

from zmpi import __version__
from zmpi.cli.options import Parser, alone
from zmpi.process.errors import UsageError
from zmpi.process.table import in_columns

COMMANDS = ("train", "verify", "bench", "plan", "generate", "export", "compare", "grade", "doctor")


def listed():
    """A line per command, from its docstring: how to run it, and what it does."""
    rows = []
    for name in COMMANDS:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        run, _, what = ast.get_docstring(ast.parse(source)).splitlines()[0].partition(": ")
        rows.append((f"  {run}", what))
    return f"zmpi {__version__}. The commands (each has --help):\n{in_columns(rows, 2)}"


def main(argv=None):
    """Print the list; for a command's name, print how to run it."""
    with alone("zmpi"):
        flags = Parser("zmpi", __doc__)
        flags.add_argument("command", nargs="?", help=argparse.SUPPRESS)
        name = flags.parse_args(argv).command
        if name in COMMANDS:
            raise UsageError(f"{name}: run it as python -m zmpi.{name}")
        if name is not None:
            raise UsageError(
                f"{name}: expected one of {', '.join(COMMANDS)}, as python -m zmpi.NAME"
            )
        print(listed())


if __name__ == "__main__":
    main()
