"""Many command lines of zmpi.COMMAND in one world: refusals.py FILE COMMAND (JSON, argument lists).

Each is run on all ranks, in this process. What it ends with is taken where the process's own hook
would print it; rank 0 prints a JSON list with an entry for each: the ranks' [status, line of error,
what was printed otherwise].
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

from zmpi import World
from zmpi.process.errors import Agreed, one_line


def ended(command, arguments):
    """(status, line of error, what was printed otherwise) of a command line, on this rank."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            command.main(arguments)
    except Agreed as error:
        return error.status, one_line(error), printed.getvalue()
    except SystemExit as error:
        return error.code, "", printed.getvalue()
    return 0, "", printed.getvalue()


def main():
    world = World(device="cpu", timeout=60)
    lines, command = Path(sys.argv[1]), import_module(f"zmpi.{sys.argv[2]}")
    found = [world.share(ended(command, line)) for line in json.loads(lines.read_text())]
    if world.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
