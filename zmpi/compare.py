"""python -m zmpi.compare A.jsonl B.jsonl: compares two runs: settings, losses, weights. No MPI.

Exit status, like diff's: 0 if the results are equal to the bit, whatever the settings; 1 if they
differ; 2 for an error in a log, a checkpoint or the command line.
"""

import json
from dataclasses import asdict
from math import inf

from zmpi.cli.logged import read_log
from zmpi.cli.options import Parser, alone, file_name
from zmpi.cli.run_log import json_number
from zmpi.cli.settings import differing_settings
from zmpi.cli.side_by_side import comparison_text
from zmpi.numbers.gap import gap_between
from zmpi.process.errors import UsageError
from zmpi.saving.compared import compare_checkpoints
from zmpi.saving.found import read_checkpoint, with_newest

COMMAND = "zmpi.compare"
NOTED_ENTRIES = (
    "step",
    "updates",
    "seed",
    "size",
    "stage",
    "recipe",
    "master",
    "optimizer",
    "model",
)
DIFFERENT_STATUS = 1  # exit status


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    flags.add_argument(
        "logs",
        nargs="*",
        type=file_name,
        metavar="LOG",
        help="two files written by zmpi.train --log (none: only --checkpoints)",
    )
    flags.add_argument(
        "--checkpoints",
        nargs=2,
        type=file_name,
        metavar=("DIR_A", "DIR_B"),
        help="two folders of checkpoints (uses the newest of each), or two checkpoints",
    )
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def main(argv=None):
    """Run the command; an error is one line, status 2."""
    with alone(COMMAND):
        args = parser().parse_args(argv)
        if len(args.logs) not in ((0, 2) if args.checkpoints else (2,)):
            raise UsageError(f"LOG: expected two logs, got {len(args.logs)}; see --help")
        report = {"equal": True}
        if args.logs:
            report["logs"] = _compared_logs(*map(read_log, args.logs))
        if args.checkpoints:
            report["checkpoints"] = _compared_folders(*args.checkpoints)
        report["equal"] = all(part["equal"] for part in report.values() if isinstance(part, dict))
        print(json.dumps(report, allow_nan=False) if args.json else comparison_text(report))
    if not report["equal"]:
        raise SystemExit(DIFFERENT_STATUS)


# -- logs ----------------------------------------------------------------------------------------


def _compared_logs(a, b):
    """The report's "logs": settings, steps and numbers of two Logged."""
    both = sorted({*a.steps} & {*b.steps})
    steps = {
        "both": _span(both),
        "only_a": _span(sorted({*a.steps} - {*both})),
        "only_b": _span(sorted({*b.steps} - {*both})),
    }
    numbers = {
        name: _compared_numbers(of, b.numbers[name])
        for name, of in a.numbers.items()
        if name in b.numbers
    }
    headers = a.header is not None and b.header is not None
    same = not (steps["only_a"]["count"] or steps["only_b"]["count"])
    return {
        "equal": same and not any(found["differ"] for found in numbers.values()),
        "a": {"path": a.path, "steps": _span(a.steps), "end": a.end},
        "b": {"path": b.path, "steps": _span(b.steps), "end": b.end},
        "settings": [asdict(one) for one in differing_settings(a.header, b.header)]
        if headers
        else None,
        "steps": steps,
        "numbers": numbers,
    }


def _span(steps):
    """{"count", "first", "last"} of sorted steps."""
    ends = {"first": steps[0], "last": steps[-1]} if steps else {"first": None, "last": None}
    return {"count": len(steps), **ends}


def _compared_numbers(a, b):
    """Where two {step: value} differ first, and most."""
    common = sorted(a.keys() & b.keys())
    gaps = [_gap_of({"step": step}, a[step], b[step]) for step in common if a[step] != b[step]]
    largest = max(gaps, key=lambda found: _infinite_if_none(found["relative"]), default=None)
    return {
        "compared": len(common),
        "differ": len(gaps),
        "first": gaps[0] if gaps else None,
        "largest": largest,
    }


def _gap_of(where, a, b, dtype="float64"):
    """Two numbers, where they are, and their Gap. None: a number that is not finite."""
    apart = gap_between(*(inf if value is None else value for value in (a, b)), dtype)
    return {**where, "a": a, "b": b, **asdict(apart)}


def _infinite_if_none(value):
    return inf if value is None else value


# -- checkpoints ---------------------------------------------------------------------------------


def _compared_folders(a, b):
    """The report's "checkpoints", of the newest in two folders."""
    return with_newest(
        a,
        lambda one: with_newest(
            b, lambda other: _compared_manifests(read_checkpoint(one), read_checkpoint(other))
        ),
    )


def _compared_manifests(a, b):
    """The saved settings that differ, then the weights and moments."""
    one, other = _noted(a), _noted(b)
    names = [*one, *(name for name in other if name not in one)]
    settings = [
        {"name": name, "a": one.get(name), "b": other.get(name)}
        for name in names
        if one.get(name) != other.get(name)
    ]
    shapes = a.differs(b.shapes, f"{b.folder}")
    vectors = (
        {} if shapes else {n: _vector(found) for n, found in compare_checkpoints(a, b).items()}
    )
    same = not shapes and a["vectors"] == b["vectors"]
    same &= all(a[name] == b[name] for name in ("step", "updates", "master"))
    return {
        "equal": same and not any(vector["differ"] for vector in vectors.values()),
        "a": {"path": str(a.folder), "vectors": a["vectors"]},
        "b": {"path": str(b.folder), "vectors": b["vectors"]},
        "settings": settings,
        "shapes": shapes,
        "vectors": vectors,
    }


def _noted(manifest):
    """{name: value} of a manifest's run; an object's values are named `key.inner`."""
    found = {}
    for name in NOTED_ENTRIES:
        value = manifest[name]
        inner = value.items() if isinstance(value, dict) else ()
        found |= {f"{name}.{key}": of for key, of in inner} if inner else {name: value}
    return found


def _vector(found):
    """A ComparedVector for the report."""
    counts = {name: getattr(found, name) for name in ("elements", "differ", "parameters")}
    counts["parameters_differ"] = found.parameters_differ
    for which in ("first", "largest"):
        element = getattr(found, which)
        counts[which] = element and _element(element)
    return counts


def _element(element):
    where = {"name": element.name, "index": [*element.index]}
    dtype = element.a.dtype.name
    values = (json_number(float(value)) for value in (element.a, element.b))
    return {**_gap_of(where, *values, dtype), "dtype": dtype}


if __name__ == "__main__":
    main()
