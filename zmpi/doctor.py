"""mpirun -n 2 python -m zmpi.doctor: checks your MPI: does it work, is it CUDA-aware, how fast?"""

import os
import platform
from statistics import median
from time import perf_counter

import numpy as np

from zmpi.cli.options import Parser
from zmpi.cli.shared_flags import WORLD_FLAGS, add_shared
from zmpi.cli.start import start_command
from zmpi.core.layout import Layout
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger
from zmpi.process.blas import kernels_in_use
from zmpi.process.cores import usable_cores
from zmpi.process.launch import launcher
from zmpi.process.machine import cpu_name
from zmpi.process.streams import check_printed
from zmpi.process.table import in_columns

COMMAND = "zmpi.doctor"
VECTOR_ELEMENTS = (1 << 14, 1 << 18, 1 << 20, 1 << 22)  # float32: 64 KiB to 16 MiB
TIMED_ROUNDS = 7  # of which the median counts


def parser():
    """All flags."""
    flags = Parser(COMMAND, __doc__)
    add_shared(flags.add_argument_group("execution"), *WORLD_FLAGS, timeout=60)
    return flags


def main(argv=None):
    """Print the report, with the verdict as its last line. Status 1 if this MPI is not usable."""
    _, world = start_command(parser(), argv)
    ranks = world.share(_own_facts(world), "the doctor's figures")
    rates, wrong = _rates(world)
    wrong = [text for text in world.share(wrong, "the doctor's figures") if text]
    gpus_way, how = world.transport_for("cuda")
    aware = gpus_way == "direct"
    if world.rank == 0:
        standard, threads = world.standard
        library = " ".join(world.library.split())
        print(f"MPI       {library}; standard {standard}, thread level {threads}")
        print(f"launcher  {launcher(os.environ)}, {world.size} rank{'s' if world.size > 1 else ''}")
        aware_or_not = "aware" if aware else "not aware"
        print(f"CUDA      {aware_or_not}; arrays on GPUs would go {gpus_way} ({how})")
        device = f"device {world.device.name} {_chosen(world.device)}"
        print(f"transport {world.transport} ({world.transport_why}), {device}")
        print(
            in_columns(
                [
                    ("rank", "host", "processor", "BLAS kernels", "cores", "threads", "device"),
                    *ranks,
                ],
                left=4,
            )
        )
        print(rates)
        print(verdict(world, threads, aware, wrong), flush=True)
    with world.agreed():
        check_printed()
    if wrong:
        raise SystemExit(1)


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


def _own_facts(world):
    """This rank's row."""
    own, _ = usable_cores(os.environ)
    device = world.device.name
    return (
        str(world.rank),
        platform.node(),
        cpu_name(),
        kernels_in_use(),
        str(own),
        str(world.threads),
        device,
    )


def _chosen(device):
    return f"(auto: {device.why})" if device.why else "(as requested)"


def _rates(world):
    """(table of MB/s sent per rank, error or None), of training's collectives, checked."""
    rows, wrong = (
        [("float32 vector", "all-gather", "reduce-scatter, mpi", "reduce-scatter, ordered")],
        None,
    )
    for elements in VECTOR_ELEMENTS:
        cells, fault = _rates_at(world, elements)
        rows.append((f"{elements * 4 >> 10:,} KiB", *cells))
        wrong = wrong or fault
    return f"MB/s sent by each rank, median of {TIMED_ROUNDS}\n" + in_columns(rows), wrong


def _rates_at(world, elements):
    """(a cell per collective, error or None), for vectors of `elements`."""
    layout, wrong, total = (
        Layout("probe", "", {"x": (elements,)}, world.size),
        None,
        world.size * (world.size + 1) // 2,
    )
    comms = [Communicator(world, Ledger(), reduction) for reduction in ("mpi", "ordered")]
    for comm in comms:
        comm.reserve([layout], np.float32)
    put, get = world.device.put, world.device.get
    shard = put(np.full(layout.shard_length, world.rank + 1, np.float32))
    full, out = (
        put(np.zeros(layout.padded, np.float32)),
        put(np.zeros(layout.shard_length, np.float32)),
    )
    cells = [_rate(world, layout, lambda: comms[0].all_gather(layout, shard, full).wait())]
    if not np.array_equal(
        get(full), np.repeat(np.arange(1, world.size + 1, dtype=np.float32), layout.shard_length)
    ):
        wrong = f"an all-gather of {elements:,} elements was wrong on rank {world.rank}"
    full.fill(world.rank + 1)
    for comm in comms:
        cells.append(
            _rate(world, layout, lambda comm=comm: comm.reduce_scatter(layout, full, out, True))
        )
        if not np.all(get(out) == total):
            what = f"a reduce-scatter ({comm.reduction}) of {elements:,} elements"
            wrong = f"{what} was wrong on rank {world.rank}"
    return cells, wrong


def _rate(world, layout, call):
    """MB/s sent by a rank in one call, as text."""
    call()
    times = []
    for _ in range(TIMED_ROUNDS):
        with world.guard.waiting("the doctor's meeting"):
            world.mpi.Barrier()
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    sent = (world.size - 1) * layout.shard_length * 4
    return f"{sent / median(times) / 1e6:,.0f}" if sent else "-"


if __name__ == "__main__":
    main()
