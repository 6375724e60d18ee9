"""The files of world/: on which numbers of ranks they run, and running many in one world.

`worlds.py FOLDER CHOSEN`, with CHOSEN a JSON list of [size, files], runs them size by size; as
soon as a size is done, FOLDER gets SIZE.json with its failures.
"""

import ast
import json
import sys
from pathlib import Path

from mpirun import run_world

SIZES = (1, 2, 3, 4)
TIMEOUT = 1200  # seconds for all files of one size; each of their tests has a limit of its own
FILES = sorted((Path(__file__).parent / "world").glob("test_*.py"))


def sizes_of(file):
    """A test file's module-level SIZES, read without importing it (that would start MPI)."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            "SIZES"
        ]:
            return ast.literal_eval(node.value)
    return SIZES


def failures(size, files, folder):
    """{file: what its world printed} of the files that failed on `size` ranks.

    All are started in one world. What fails ends it: the files after it run in a new one.
    """
    found, started = {}, folder / f"started-{size}"
    while files:
        started.write_text("")
        flags = ["-q", "-p", "no:cacheprovider", f"--started={started}"]
        world = run_world(size, ["-m", "pytest", *files, *flags], TIMEOUT)
        if not world.status and not world.left:
            break
        reached = [file for file in files if file.name in started.read_text().splitlines()]
        if not reached and len(files) > 1:  # one of them cannot be collected
            return found | {k: v for f in files for k, v in failures(size, [f], folder).items()}
        last = reached[-1] if reached else files[0]
        found[last] = f"status {world.status}\n{world.output}"
        files = files[files.index(last) + 1 :]
    return found


def main(folder, chosen):
    for size, files in json.loads(chosen):
        found = failures(size, [Path(file) for file in files], folder)
        written = folder / f"{size}.part"
        written.write_text(json.dumps({file.name: text for file, text in found.items()}))
        written.rename(folder / f"{size}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
