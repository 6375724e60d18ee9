"""Many wrong command lines of zmpi.train in one world: refusals.py FILE (JSON, argument lists).

Each is run on all ranks, in this process. What it ends with is taken where the process's own hook
would print it; rank 0 prints a JSON list with an entry for each: the ranks' [status, line of error,
what was printed otherwise].
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from zmpi import World, train
from zmpi.process.errors import Agreed, one_line


def ended(arguments):
    """(status, line of error, what was printed otherwise) of a command line, on this rank."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            train.main(arguments)
    except Agreed as error:
        return error.status, one_line(error), printed.getvalue()
    except SystemExit as error:
        return error.code, "", printed.getvalue()
    return 0, "", printed.getvalue()


def main():
    world = World(device="cpu", timeout=60)
    found = [world.share(ended(line)) for line in json.loads(Path(sys.argv[1]).read_text())]
    if world.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
