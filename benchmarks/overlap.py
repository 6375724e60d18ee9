"""mpirun -n 2 python benchmarks/overlap.py: what prefetch hides here; see docs/OVERLAP.md.

1. One all-gather: blocking; started and waited for after 20 ms of computing without MPI; and the
   same with a test of the request every millisecond. The wait that remains was not hidden.
2. Steps at stage 3 with --prefetch 0 and 1, in turns: the whole step, and its time spent starting
   gathers and waiting for them, from the trace. Medians of rank 0.

If the library progresses in the background: MPIR_CVAR_ASYNC_PROGRESS=1 (MPICH; a core per rank).
"""

import zmpi  # before NumPy: it chooses what BLAS reads when it is loaded

from statistics import median
from time import perf_counter

import numpy as np

from models import GPT
from zmpi.cost.watch import watched
from zmpi.text.data import Batches, load_text
from zmpi.cost.trace import Trace
from zmpi.messages.world import MPI

COMPUTED = 0.02  # seconds
ROUNDS = 31
SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)  # bytes of the whole vector
SHAPES = {  # model, sequences of a micro-batch
    "width 96": (GPT(layers=4, width=96, heads=4, context=128, vocab=256), 4),
    "width 384": (GPT(layers=4, width=384, heads=6, context=128, vocab=256), 1),
}


def compute(seconds, step, each=lambda: None):
    """Multiply matrices for so long, and call `each` about every `step` seconds."""
    a = np.full((64, 64), 1e-3, np.float32)
    end, due = perf_counter() + seconds, perf_counter() + step
    while (now := perf_counter()) < end:
        a = a @ a
        if now >= due:
            each()
            due = now + step


def one_gather(comm, nbytes):
    """Seconds of a blocking gather, of the wait after computing, and of it after tests too."""
    full, shard = np.zeros(nbytes, np.uint8), np.ones(nbytes // comm.size, np.uint8)

    def timed(prepare, finish):
        comm.Barrier()
        request = prepare()
        began = perf_counter()
        finish(request)
        return perf_counter() - began

    def started(each):
        request = comm.Iallgather(shard, full)
        compute(COMPUTED, 0.001, (lambda: request.Test()) if each else lambda: None)
        return request

    ways = (
        (lambda: None, lambda _: comm.Allgather(shard, full)),
        (lambda: started(False), lambda request: request.Wait()),
        (lambda: started(True), lambda request: request.Wait()),
    )
    return [
        median(times)
        for times in zip(*([timed(*way) for way in ways] for _ in range(ROUNDS)), strict=True)
    ]


def steps(world, shape):
    """{prefetch: median seconds of (step, starting gathers, waiting)}, and a step's gathers."""
    model, micro_batch = SHAPES[shape]
    text = load_text("builtin", model.context, model.vocab)
    batches = Batches(text, world.rank, world.size, micro_batch, last_only=False)
    engines = {
        prefetch: watched(zmpi.ZeRO, Trace)(model, world, 3, policy=zmpi.Policy(prefetch=prefetch))
        for prefetch in (0, 1)
    }
    found = {prefetch: [] for prefetch in engines}
    for step in range(1, ROUNDS + 3):
        for prefetch, zero in engines.items():
            zero.train_step(batches.of_step(0, step, 1))
            events = zero.ledger.steps[-1]
            spent = {
                verb: sum(e["end"] - e["start"] for e in events if e["verb"] == verb)
                for verb in ("step", "gather", "wait")
            }
            if step > 2:  # the first ones fault memory in
                found[prefetch].append(list(spent.values()))
    gathers = sum(zero.schedule.gathers.values())
    return {
        p: [median(column) for column in zip(*rows, strict=True)] for p, rows in found.items()
    }, gathers


def main():
    """Print both tables, on rank 0."""
    world = zmpi.World(device="cpu")
    say = print if world.rank == 0 else lambda *_: None
    say(f"{world.size} ranks; {MPI.Get_library_version().splitlines()[0]}")
    say("one all-gather, ms       blocking   wait after 20 ms   with tests")
    for nbytes in SIZES:
        times = [f"{seconds * 1e3:.3f}" for seconds in one_gather(world.mpi, nbytes)]
        say(f"{nbytes / 1024:>10,.0f} KiB {times[0]:>17} {times[1]:>18} {times[2]:>12}")
    say("a training step, ms    prefetch     step   starting   waiting   gathers")
    for shape in SHAPES:
        found, gathers = steps(world, shape)
        for prefetch, times in found.items():
            step, start, wait = (f"{seconds * 1e3:.2f}" for seconds in times)
            say(f"{shape:20} {prefetch:>10} {step:>8} {start:>10} {wait:>9} {gathers:>9}")


if __name__ == "__main__":
    main()
