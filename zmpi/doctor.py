"""mpirun -n 2 python -m zmpi.doctor: checks your MPI: does it work, is it CUDA-aware, how fast?"""

import json
import os
import platform
import re
import sys
from contextlib import ExitStack, closing

from zmpi import __version__
from zmpi.cli.options import Parser, file_name
from zmpi.cli.shared_flags import WORLD_FLAGS, add_shared
from zmpi.cli.start import start_command
from zmpi.cost.links import ROUNDS, VECTOR_ELEMENTS, WHOLE, measure_links, parts_of
from zmpi.process.blas import kernels_in_use
from zmpi.process.cores import usable_cores
from zmpi.process.launch import launcher
from zmpi.process.machine import cpu_name
from zmpi.process.output import Output
from zmpi.process.streams import check_printed
from zmpi.process.table import in_columns

COMMAND = "zmpi.doctor"
COLUMNS = ("rank", "node", "host", "processor", "BLAS kernels", "cores", "threads", "device")
OWN_JSON = re.compile(rb'{"zmpi": "[^"]+", "argv": \[.*\], "verdict": ')


def parser():
    """All flags."""
    flags = Parser(COMMAND, __doc__)
    add_shared(flags.add_argument_group("execution"), *WORLD_FLAGS, timeout=60)
    out = flags.add_argument_group("output")
    out.add_argument("--json", type=file_name, metavar="FILE", help="all figures")
    return flags


def main(argv=None):
    """Print the report, with the verdict as its last line. Status 1 if this MPI is not usable."""
    args, world = start_command(parser(), argv)
    with ExitStack() as held:
        file = None
        with world.agreed():
            if args.json and world.rank == 0:
                file = Output("--json", args.json, OWN_JSON.match, "the JSON of a doctor")
                held.enter_context(closing(file))
        report = _examine(world)
        with world.agreed():
            if world.rank == 0:
                print(_text(world, report), flush=True)
                if file:
                    file.replace(json.dumps(report, allow_nan=False))
            check_printed()
    if not report["usable"]:
        raise SystemExit(1)


def _examine(world):
    """All findings, as --json writes them. Collective."""
    ranks = world.share(_own_facts(world, world.nodes()), "the doctor's figures")
    nodes = [rank["node"] for rank in ranks]
    links, wrong = {}, None
    for name, part in parts_of(world, nodes).items():
        links[name], fault = measure_links(part)
        wrong = wrong or fault
    wrong = [text for text in world.share(wrong, "the doctor's figures") if text]
    way, how = world.transport_for("cuda")
    standard, threads = world.standard
    return {
        "zmpi": __version__,
        "argv": sys.argv[1:],
        "verdict": verdict(world, threads, way == "direct", wrong),
        "usable": not wrong,
        "mpi": " ".join(world.library.split()),
        "standard": standard,
        "thread_level": threads,
        "launcher": launcher(os.environ),
        "cuda": {"transport": way, "why": how},
        "ranks": ranks,
        "links": _sent(links.pop(WHOLE)),
        "parts": {name: _sent(of_part) for name, of_part in links.items()},
    }


def _sent(links):
    """Without the calls of a world of one, which sent nothing."""
    return {name: [point for point in points if point[0]] for name, points in links.items()}


def _text(world, report):
    """The report, as printed."""
    size, cuda = world.size, report["cuda"]
    aware = "aware" if cuda["transport"] == "direct" else "not aware"
    rows = [tuple(map(str, rank.values())) for rank in report["ranks"]]
    levels = f"standard {report['standard']}, thread level {report['thread_level']}"
    nodes = len({rank["node"] for rank in report["ranks"]})
    counts = f"{size} rank{'s' * (size > 1)} on {nodes} node{'s' * (nodes > 1)}"
    device = f"device {world.device.name} {_chosen(world.device)}"
    lines = [
        f"MPI       {report['mpi']}; {levels}",
        f"launcher  {report['launcher']}, {counts}",
        f"CUDA      {aware}; arrays on GPUs would go {cuda['transport']} ({cuda['why']})",
        f"transport {world.transport} ({world.transport_why}), {device}",
        in_columns([COLUMNS, *rows], left=5),
        f"MB/s sent by each rank, medians of {ROUNDS[0]} to {ROUNDS[1]} calls",
        _rates(report["links"]),
    ]
    for name, links in report["parts"].items():
        lines += [f"{name} alone", _rates(links)]
    return "\n".join([*lines, report["verdict"]])


def _rates(links):
    """A table of MB/s by collective and length."""
    rows = [("float32 vector", "all-gather", "reduce-scatter, mpi", "reduce-scatter, ordered")]
    for number, elements in enumerate(VECTOR_ELEMENTS):
        points = [of_kind[number] for of_kind in links.values() if of_kind]
        cells = [f"{sent / seconds / 1e6:,.0f}" for sent, seconds in points] or ["-"] * len(links)
        rows.append((f"{elements * 4 >> 10:,} KiB", *cells))
    return in_columns(rows)


def verdict(world, threads, aware, wrong):
    """One line: usable or not, and the consequences."""
    if wrong:
        return f"verdict: not usable: {wrong[0]}"
    remarks = []
    if world.size == 1:
        remarks.append("only one rank, so nothing was sent (run it with mpirun -n 2)")
    if threads != "multiple":
        remarks.append(
            f"thread level {threads}: a rank that hangs cannot ask the others where they are"
        )
    remarks.append(
        "GPU memory can be sent directly" if aware else "GPU memory would go through the host"
    )
    return "verdict: usable; " + "; ".join(remarks)


def _own_facts(world, nodes):
    """This rank's row."""
    own, _ = usable_cores(os.environ)
    return {
        "rank": world.rank,
        "node": nodes[world.rank],
        "host": platform.node(),
        "processor": cpu_name(),
        "blas": kernels_in_use(),
        "cores": own,
        "threads": world.threads,
        "device": world.device.name,
    }


def _chosen(device):
    return f"(auto: {device.why})" if device.why else "(as requested)"


if __name__ == "__main__":
    main()
