"""mpirun -n 4 python -m zmpi.bench: benchmarks every stage here, formula next to measurement."""

import json
import re
import sys
from argparse import ArgumentTypeError
from contextlib import ExitStack, closing
from time import sleep

from models.layer import one_target, parameter_count
from zmpi import __version__
from zmpi.cli.bench_flags import add_bench_flags
from zmpi.cli.model_flags import (
    DEFAULT_SIZES,
    build_model,
    refuse_beyond_memory,
)
from zmpi.cli.optimizer_flags import OPTIMIZERS, own_optimizer
from zmpi.cli.options import Parser, check_files, named_as_flags, stage
from zmpi.cli.own import FileClass, leave_defaults
from zmpi.cli.start import engine_of, refuse_different_texts, start_command
from zmpi.core.stages import placement
from zmpi.cost.bench_table import heading, stage_table, sweep_table
from zmpi.cost.measure import Workload, measure_stages
from zmpi.cost.page import open_page, write_report
from zmpi.numbers.precision import Policy
from zmpi.process.errors import UsageError
from zmpi.process.machine import machine_facts
from zmpi.process.output import Output
from zmpi.process.streams import check_printed
from zmpi.saving.checkpoint import MODEL_ATTRIBUTES
from zmpi.text.data import Batches, load_text

COMMAND = "zmpi.bench"
LR = {"lr": 3e-3}


def parser():
    """All flags. The names are a contract."""
    flags = Parser(COMMAND, __doc__)
    add_bench_flags(flags)
    return flags


def main(argv=None):
    """Run the command; an error ends all ranks with one line."""
    args, world = start_command(parser(), argv)
    leave_defaults(args, "model", DEFAULT_SIZES, parser().given(argv))
    with ExitStack() as held:  # closes the files, however this ends
        _run(args, world, held)


def _run(args, world, held):
    """From the flags to the files."""
    with world.agreed():
        stages = _stages(args.stages, len(world.axes))
        points = _points(args, world)
        for point in points:
            workload = _workload(args, world, point)
            refuse_beyond_memory(args, workload.build(), world, min(stages))
    refuse_different_texts(world, workload.batches.text)
    with world.agreed():
        if world.rank == 0:
            outputs = _open_outputs(args, held)
    reports = []
    for point in points:
        report = _bench(args, world, stages, point)
        if world.rank == 0:
            print(heading(report) + "\n\n" + stage_table(report) + "\n", flush=True)
        reports.append(report)
    if args.sweep and world.rank == 0:
        print(sweep_table(args.sweep, reports), flush=True)
    with world.agreed():
        if world.rank == 0:
            _write(args, reports, *outputs)
        check_printed()


def _stages(text, axes):
    """The stages of the flag, each once, in order; with groups (inside, outside) pairs."""
    text = text or ("0,1,2,3" if axes == 1 else "0,0 3,0 3,1 3,3")
    try:
        stages = [stage(one) for one in (text.split() if axes > 1 else text.split(","))]
    except ArgumentTypeError:
        stages = []
    if not stages or len(set(stages)) < len(stages):
        some = "some of 0,1,2,3" if axes == 1 else "pairs such as 3,3 3,1"
        raise ValueError(f"--stages: expected {some}, each once, got {text}")
    for one in stages:
        placement(one, axes)
    return stages


def _points(args, world):
    """What each run of the sweep changes; [{}], no change, without --sweep."""
    if args.sweep == "ranks" and world.group:
        raise ValueError("--sweep: ranks cannot be combined with --group")
    if args.sweep == "ranks":
        return [
            {"ranks": n}
            for n in sorted({*(2**i for i in range(world.size.bit_length())), world.size})
            if n <= world.size
        ]
    if args.sweep == "batch":
        return [{"micro_batch": args.micro_batch * factor} for factor in (1, 2, 4)]
    if args.sweep == "width":
        return [{"width": args.width * factor} for factor in (1, 2, 4)]
    return [{}]


def _workload(args, world, point):
    """The Workload of one point; ValueError or OSError for flags that conflict."""
    micro_batch = point.get("micro_batch", args.micro_batch)
    changed = {"width": point["width"]} if "width" in point else {}

    def build():
        return build_model(args, **changed)

    model = build()
    with named_as_flags():
        policy = Policy(args.precision, args.prefetch, args.recompute)
    world.reduction_for(policy.recipe)
    text = load_text(args.data, model.context, model.vocab, world.rank, world.size)
    batches = Batches.on(world, text, micro_batch, one_target(model))
    steps = args.accumulate, args.warm_up, args.steps
    parts = engine_of(args.comm)
    return Workload(build, policy, _optimizer(args), args.seed, batches, *steps, parts)


def _optimizer(args):
    """The optimizer of the flag. Its hyperparameters do not affect the cost."""
    if isinstance(args.optimizer, FileClass):
        return own_optimizer(args.optimizer, {}, LR)
    return OPTIMIZERS[args.optimizer](**LR, clip=1.0)


def _bench(args, world, stages, point):
    """All stages at one point of the sweep: the report for --json. Ranks without a part wait."""
    part = _first_ranks(world, point.get("ranks", world.size))
    report = None
    if part is not None:
        workload = _workload(args, part, point)
        turns, rows = measure_stages(workload, part, stages, lanes=bool(args.report))
        model = workload.build()
        report = {
            "zmpi": __version__,
            "argv": sys.argv[1:],
            "point": point,
            "model": {
                "kind": args.model,
                **{name: getattr(model, name) for name in MODEL_ATTRIBUTES if hasattr(model, name)},
            },
            "parameters": parameter_count(model),
            "recipe": workload.policy.recipe.bytes_per_parameter(len(workload.optimizer.moments)),
            "size": part.size,
            "group": part.group,
            "micro_batch": workload.batches.micro_batch,
            "accumulate": args.accumulate,
            "optimizer": args.optimizer,
            "comm": args.comm,
            "prefetch": args.prefetch,
            "recompute": args.recompute,
            "steps": args.steps,
            "warm_up": args.warm_up,
            "reduction": part.reduction_for(workload.policy.recipe),
            "peak_flops": args.flops,
            "machine": machine_facts(part),
            **turns,
            "stages": rows,
        }
    meeting = world.mpi.Ibarrier()
    while not meeting.Test():
        sleep(0.01)  # MPI would wait in a busy loop, on a core that a working rank needs
    return report


def _first_ranks(world, ranks):
    """A World of the first `ranks` ranks; None on the others."""
    if ranks == world.size:
        return world
    part = world.part(world.mpi.Split(world.rank >= ranks, world.rank))
    return part if world.rank < ranks else None


def _open_outputs(args, held):
    """The Outputs of --json and --report's page, or None; ValueError if one is not writable."""
    data = None if args.data == "builtin" else args.data
    check_files({"--json": args.json}, {"--data": data, "--report": args.report})
    figures = page = None
    if args.json:
        own = re.compile(rb'{"zmpi": "[^"]+", "argv": \[.*\], "point": ')
        figures = Output("--json", args.json, own.match, "the JSON of a bench")
        held.enter_context(closing(figures))
    if args.report:
        _require_matplotlib()
        page = open_page(args.report, held)
    return figures, page


def _require_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--report: needs matplotlib, which is not installed (pip install matplotlib)"
        ) from None


def _write(args, reports, figures, page):
    """Write the requested files."""
    if figures:
        plain = [
            {**report, "stages": [_without_lanes(row) for row in report["stages"]]}
            for report in reports
        ]
        whole_report = (
            {**plain[-1], "sweep": {"axis": args.sweep, "points": plain}}
            if args.sweep
            else plain[0]
        )
        figures.replace(json.dumps(whole_report, allow_nan=False))
    if page:
        write_report(page, args.sweep, reports)


def _without_lanes(row):
    return {key: value for key, value in row.items() if key != "lanes"}


if __name__ == "__main__":
    main()
