"""python -m zmpi.plan: does it fit, and what will it cost? By a formula, or by a dry run."""

import json
from argparse import ArgumentTypeError
from dataclasses import replace

from zmpi.cli.model_flags import add_model_flags, build_model
from zmpi.cli.options import Parser, alone, file_name, named_as_flags, real, whole
from zmpi.cli.shared_flags import add_shared
from zmpi.core.formulas import axis_sizes, placements
from zmpi.cost.by_formula import formula_rows, formula_table, largest_table, moved_note
from zmpi.cost.estimate import Setting, largest_fitting
from zmpi.cost.paper import both_tables, largest_model
from zmpi.cost.plan_tables import fits_table, memory_table, moved_table, name_of, times_table
from zmpi.cost.speed import Speed, links_of, ranks_that_pay, speed_of
from zmpi.numbers.precision import RECIPES, Policy
from zmpi.process.errors import UsageError
from zmpi.process.files import named
from zmpi.process.table import in_bytes
from zmpi.text.formats import refuse_irregular

COMMAND = "zmpi.plan"
FORMULA = ("params", "ranks", "precision", "memory", "json")  # flags that need no model
LARGEST_BENCH = 1 << 26  # the most bytes read of a bench's JSON


def parser():
    """All flags."""
    flags = Parser(COMMAND, __doc__)
    what = flags.add_argument_group("a number of parameters")
    what.add_argument(
        "--params",
        type=real(1),
        help="number of parameters: only the state, by formula (default: a model's)",
    )
    add_model_flags(flags.add_argument_group("or a model, by a dry run (with --layers)"), own=False)
    _how(flags.add_argument_group("execution"))
    _questions(flags.add_argument_group("questions").add_argument)
    flags.set_defaults(layers=None)
    return flags


def _how(group):
    ranks = "data-parallel ranks (required, except with --paper)"
    group.add_argument("--ranks", type=whole(1), help=ranks)
    shared = "--precision", "--micro-batch", "--accumulate", "--prefetch", "--recompute"
    add_shared(group, *shared, "--reduction", "--group", precision="float16", micro_batch=1)


def _questions(add):
    add(
        "--memory",
        type=real(0, above=True),
        help="bytes per rank, to find the largest that fits (default: none)",
    )
    add(
        "--bandwidth",
        type=_bandwidth,
        metavar="W[,B]",
        help="bytes per second sent by a rank, within and between groups (default: no times)",
    )
    add("--flops", type=real(0, above=True), help="FLOPs per second of a rank (default: no times)")
    add(
        "--calibrate",
        type=file_name,
        metavar="FILE",
        help="take all terms of a step's time from a bench's JSON (default: no times)",
    )
    add(
        "--doctor",
        type=file_name,
        metavar="FILE",
        help="take the messages' times from a doctor's JSON (default: from the bench)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="also show calls, elements and bytes per collective, and the peak",
    )
    add(
        "--paper",
        action="store_true",
        help="print Tables 1 and 2 of the paper next to zmpi's figures",
    )
    add("--json", action="store_true", help="print JSON, in bytes")


def main(argv=None):
    """Run the command; an error is one line, status 2."""
    with alone(COMMAND):
        print(answer(parser().parse_args(argv)))


def answer(args):
    """The command's output, without the last newline."""
    defaults = parser().parse_args([])
    given = [name for name, value in vars(args).items() if value != getattr(defaults, name)]
    if args.paper:
        _only(given, ("paper",), "cannot be combined with --paper; leave one out")
        return both_tables()
    if args.ranks is None:
        raise UsageError("--ranks: expected a number of ranks, such as --ranks 64; got none")
    if (args.params is None) == (args.layers is None):
        given = "neither" if args.params is None else "both"
        raise UsageError(f"--params: expected either --params or --layers, got {given}")
    if args.group == "node":
        raise UsageError("--group: expected a number, since a plan has no nodes; got node")
    if args.group and args.ranks % args.group:
        raise UsageError(
            f"--group: expected a number that divides --ranks {args.ranks}, got {args.group}"
        )
    if args.layers is not None:
        return _of_model(args)
    grouped = len(axis_sizes(args.ranks, args.group)) > 1
    _only(
        given,
        (*FORMULA, "group", *(("accumulate", "reduction") if grouped else ())),
        "needs a model; use --layers instead of --params",
    )
    return _of_formula(args)


def _only(given, allowed, fault):
    """Raise UsageError for the first flag that would be ignored."""
    for name in given:
        if name not in allowed:
            raise UsageError(f"--{name.replace('_', '-')}: {fault}")


# ---- a number of parameters ----------------------------------------------------------------------


def _of_formula(args):
    """State per rank at each stage (paper, sections 3.1 and 5.1-5.3); with groups, of each pair."""
    recipe, sizes = RECIPES[args.precision], axis_sizes(args.ranks, args.group)
    parameters = int(args.params) if args.params == int(args.params) else args.params
    each = args.reduction == "ordered" or recipe.gradient.itemsize < 4
    rows = formula_rows(parameters, sizes, recipe, (args.accumulate, each), args.memory)
    if args.json:
        return _json(recipe, parameters, args, rows)
    parts = [f"{_opening(parameters, args, recipe)}; {formula_table(rows, sizes)}"]
    parts += [moved_note(args.accumulate)] if len(sizes) > 1 else []
    parts += [largest_table(rows, args.memory)] if args.memory else []
    return "\n".join(parts)


def _opening(parameters, args, recipe):
    plural, sizes = "s" if args.ranks > 1 else "", axis_sizes(args.ranks, args.group)
    groups = f" = {sizes[1]:,} groups of {sizes[0]:,}" if len(sizes) > 1 else ""
    ranks = f"{args.ranks:,} rank{plural}{groups}"
    return f"{parameters:,.15g} parameters on {ranks}, {recipe.describe()}"


def _json(recipe, parameters, args, rows):
    return json.dumps(
        {
            "recipe": recipe.bytes_per_parameter(),
            "parameters": parameters,
            "ranks": args.ranks,
            "stages": rows,
        },
        allow_nan=False,
    )


# ---- a model -------------------------------------------------------------------------------------


def _of_model(args):
    """A dry run at each stage, and the answers to its questions."""
    with named_as_flags():
        policy = Policy(args.precision, args.prefetch, args.recompute)
    setting = Setting(
        lambda layers: build_model(args, layers=layers or args.layers),
        args.ranks,
        policy,
        args.micro_batch,
        args.accumulate,
        args.reduction,
        group=args.group,
    )
    placed = placements(len(axis_sizes(args.ranks, args.group)))
    asked = [[stage.number for stage in one.stages] for one in placed]
    walks = [setting.walk(stages) for stages in asked]
    speed = _speed(args)
    limits = [_limits(setting, walk, args.memory) for walk in walks] if args.memory else []
    turning = [
        ranks_that_pay(setting, *stages, speed) if len(stages) == 1 else (None, False)
        for stages in (asked if speed else ())
    ]
    recipe = policy.recipe
    if args.json:
        rows = [walk.entry() for walk in walks]
        for row, limit in zip(rows, limits, strict=False):
            row |= limit
        for row, walk, turn in zip(rows, walks, turning, strict=False):
            row |= {**_times(walk, speed), "ranks_that_pay": turn[0] if turn[1] else None}
        return _json(recipe, walks[0].elements, args, rows)
    parts = [f"{_opening(walks[0].elements, args, recipe)}\n{_run(args)}", memory_table(walks)]
    parts += [fits_table(limits, args.memory, placed)] if limits else []
    parts += [times_table(walks, turning, speed)] if speed else []
    parts += [_shortest(walks, speed, args.memory)] if speed and len(placed[0].stages) > 1 else []
    parts += [moved_table(walks, args.accumulate)] if args.dry_run else []
    return "\n\n".join(parts)


def _times(walk, speed):
    """A step's times, as JSON."""
    compute, comm = speed.compute_s(walk), speed.comm_s(walk)
    return {
        "compute_s": compute,
        "comm_s": comm,
        "step_s": [max(compute, comm), compute + comm],
        "terms_s": speed.terms(walk),
    }


def _run(args):
    """The run's settings, as text."""
    batch = args.micro_batch * args.accumulate * args.ranks
    attention = (
        f", {4 if args.heads is None else args.heads} heads" if args.model == "transformer" else ""
    )
    return (
        f"{args.model}: {args.layers} layers, width {args.width:,}{attention},"
        f" context {args.context:,}, vocab {args.vocab:,}; a step is"
        f" {args.micro_batch} x {args.accumulate} x {args.ranks:,} = {batch:,} sequences;"
        f" prefetch {args.prefetch}, recompute {'on' if args.recompute else 'off'}"
    )


def _speed(args):
    """The Speed of the flags, or None."""
    if args.doctor and not args.calibrate:
        raise UsageError("--doctor: gives only messages; a step's time also needs --calibrate")
    if args.calibrate:
        if args.flops or args.bandwidth:
            raise UsageError("--calibrate: gives both speeds; leave out --flops and --bandwidth")
        links = {}
        if args.doctor:
            what = "zmpi.doctor on at least 2 ranks"
            links = _measured("--doctor", args.doctor, links_of, what)
        what = "zmpi.bench on at least 2 ranks, with a stage that did not fail"
        speed = _measured("--calibrate", args.calibrate, speed_of, what)
        return replace(speed, **links)
    if (args.flops is None) != (args.bandwidth is None):
        raise UsageError("--bandwidth: a step's time needs --flops too, got only one of the two")
    return Speed(args.flops, *args.bandwidth) if args.flops else None


def _measured(flag, path, read, what):
    """What `read` finds in a JSON file; UsageError if it is something else."""
    refuse_irregular(flag, path)
    with named(f"{flag}: {path}"), open(path, "rb") as file:
        text = file.read(LARGEST_BENCH)
    wrong = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
    try:
        return read(json.loads(text))
    except wrong:
        raise UsageError(f"{flag}: expected the JSON of {what}; got {path}") from None


def _shortest(walks, speed, memory):
    """Which placement has the shortest step, of those that fit."""
    fitting = [walk for walk in walks if not memory or walk.peak <= memory]
    if not fitting:
        return f"no placement fits {in_bytes(memory)} per rank"
    best = min(fitting, key=lambda walk: speed.compute_s(walk) + speed.comm_s(walk))
    room = f" that fits {in_bytes(memory)} per rank" if memory else ""
    return f"shortest step{room}: stage {best.stage.number} {name_of(best.stage)}".rstrip()


def _bandwidth(text):
    """An argparse type: bytes per second, or two numbers: within and between groups."""
    rates = [real(0, above=True)(part) for part in text.split(",")]
    if len(rates) > 2:
        raise ArgumentTypeError(f"expected one or two numbers, got {text}")
    return rates


def _limits(setting, walk, memory):
    """The largest model and micro-batch that fit, at the walk's stage."""
    stage = [one.number for one in walk.stage.stages]
    layers = largest_fitting(lambda n: setting.walk(stage, layers=n).peak, memory)
    state = largest_model(walk.stage, setting.sizes, memory, setting.policy.recipe)
    found = {"largest_parameters": state, "largest_layers": layers}
    found["largest_micro_batch"] = largest_fitting(
        lambda n: setting.walk(stage, micro_batch=n).peak, memory
    )
    return found


if __name__ == "__main__":
    main()
