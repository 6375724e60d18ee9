"""python -m zmpi.grade: grades the course in examples/course, in worlds of 1 to 4 ranks that it
starts itself.
"""

from pathlib import Path

from zmpi.cli.options import Parser, alone, check_files, file_name, real, whole
from zmpi.course.marks import grade_files
from zmpi.course.printed import as_json, as_junit, had, marks_as_text, to_be_had
from zmpi.course.tasks import TASKS
from zmpi.process.errors import UsageError
from zmpi.process.output import Output

COMMAND = "zmpi.grade"


def parser():
    """All flags."""
    flags = Parser(COMMAND, __doc__)
    flags.add_argument(
        "task",
        nargs="?",
        choices=[str(number) for number in TASKS],
        help="one task, or the questions (default: all)",
    )
    add = flags.add_argument
    add("--folder", type=file_name, default=".", help="the folder of the course's files")
    add("--points", action="store_true", help="print points for each task, and the total")
    add("--seed", type=whole(0), default=0, help="draws the cases: shapes, sizes, data")
    add("--limit", type=real(0, above=True), default=20, help="seconds for one case")
    add("--junit", type=file_name, metavar="FILE", help="write JUnit XML")
    add("--json", type=file_name, metavar="FILE", help="write JSON")
    return flags


def main(argv=None):
    """Run the command. Status 1 where a check failed."""
    with alone(COMMAND):
        args = parser().parse_args(argv)
        check_files({"--junit": args.junit, "--json": args.json}, {})
        files = chosen(Path(args.folder), args.task)
        outputs = opened(args)
        marked = grade_files(files, args.seed, args.limit)
        print(marks_as_text(marked, args.points))
        for output, text in outputs:
            output.replace(text(marked))
            output.close()
        if had(marked) < to_be_had(marked):
            raise SystemExit(1)


def chosen(folder, task):
    """[(task, file), ...] of the tasks that are asked for. Raises UsageError where none exists."""
    wanted = [number for number in TASKS if task in (None, str(number))]
    found = [(number, folder.resolve() / TASKS[number].file) for number in wanted]
    if not any(file.is_file() for _, file in found):
        names = ", ".join(TASKS[number].file for number in wanted)
        raise UsageError(f"--folder: expected {names}; got {folder}, which has none of them")
    return found


def opened(args):
    """[(Output, what writes it), ...], opened before the work begins."""
    found = []
    if args.junit:
        recognise = lambda head: head.startswith(b"<?xml") and b"<testsuites>" in head  # noqa: E731
        found.append(
            (Output("--junit", args.junit, recognise, "JUnit XML of zmpi.grade"), as_junit)
        )
    if args.json:
        recognise = lambda head: head.startswith(b'{\n "points"')  # noqa: E731
        output = Output("--json", args.json, recognise, "JSON of zmpi.grade")
        found.append((output, lambda marked: as_json(marked, args.seed)))
    return found


if __name__ == "__main__":
    main()
