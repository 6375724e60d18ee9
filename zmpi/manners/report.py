"""What a run says: its JSON log, its opening lines and its summary. Figures are of all ranks, and beside the formula."""

import json
import os
import sys
from math import isfinite

from zmpi import __version__
from zmpi.ledger import OWNED
from zmpi.saving.blocks import named
from zmpi.stages import elements_moved, state_bytes

BEGINNING = b'{"zmpi"'  # of every log
MEMORY = (*OWNED, "full_peak", "work", "peak")


class RunLog:
    """The log file of a run (rank 0 writes; without a path nobody does), and the last entries for the summary.

    With --resume a log that is there is continued. Raises ValueError where the file cannot be written, or is no log.
    """

    def __init__(self, path, zero, args, argv, data):
        self.zero = zero
        self.last = self.last_evaluation = None
        self._file = None
        if path is None or zero.world.rank != 0:
            return
        kept = _kept(path, zero.step) if args.resume else 0
        with named(path):
            self._file = open(path, "r+b" if kept else "wb")  # noqa: SIM115  (open for the whole run)
        if kept:
            self._file.seek(kept)
            self._file.truncate()
        else:
            self._write(header(zero, args, sys.argv if argv is None else argv, data))

    def step(self, seconds):
        """Log the engine's last step, which took so many seconds here. Gathers every rank's memory; all ranks call it."""
        zero, step = self.zero, self.zero.last
        comm, memory = zero.ledger["comm"], zero.ledger["memory"]
        everyone = zero.world.share(memory, "the log's entry")
        self.last = {
            "step": zero.step,
            "loss": _number(step.loss),
            "grad_norm": _number(step.grad_norm),
            "lr": step.lr,
            "tokens": step.tokens,
            "step_s": seconds,
            "tokens_per_s": step.tokens / seconds,
            "optimizer_t": zero.updates,
            "loss_scale": step.loss_scale,
            "skipped": int(step.skipped),
            "comm": comm,
            "memory": {kind: [mine[kind] for mine in everyone] for kind in MEMORY},
        }
        self._write(self.last)

    def evaluation(self, loss, tokens):
        """Log a held-out loss over so many targets."""
        self.last_evaluation = {
            "step": self.zero.step,
            "val_loss": _number(loss),
            "val_tokens": tokens,
        }
        self._write(self.last_evaluation)

    def _write(self, entry):
        if self._file:
            with named(self._file.name):
                self._file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
                self._file.flush()


def _kept(path, step):
    """Bytes at the start of a log that a run resumed after `step` continues: a killed run may have logged more steps."""
    kept = 0
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(BEGINNING)) not in (b"", BEGINNING):
                raise ValueError(
                    f"--log: {path} is no log of zmpi.train: it is neither continued nor written over"
                )
            file.seek(0)
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n") or entry.get("step", 0) > step:
                    break
                kept += len(line)
    return kept


def _number(value):
    return value if isfinite(value) else None


def header(zero, args, argv, data):
    """The log's first line. `data`: what tells its text from another."""
    layouts = [unit.layout for unit in zero.units.values()]
    return {
        "zmpi": __version__,
        "argv": list(argv),
        "size": zero.world.size,
        "stage": zero.stage.number,
        "parameters": sum(layout.elements for layout in layouts),
        "unit_sizes": {layout.name: layout.elements for layout in layouts},
        "padded_unit_sizes": {layout.name: layout.padded for layout in layouts},
        "recipe": zero.policy.recipe.bytes_per_parameter(len(zero.optimizer.moments)),
        "micro_batch": args.micro_batch,
        "accumulate": args.accumulate,
        "threads": zero.world.threads,
        "device": zero.world.device.name,
        "mpi": zero.world.library,
        "transport": zero.world.transport,
        "reduction": zero.comm.reduction,
        "data": {"source": args.data, **data},
    }


def opening(zero, args, text):
    """What is about to run, in a few lines: everything that was chosen for the user is named."""
    world = zero.world
    parameters = sum(unit.layout.elements for unit in zero.units.values())
    evaluated = f"{text.evaluated} sequence{'s' * (text.evaluated > 1)}"
    held_out = (
        f"{len(text.held_out):,} held out (an evaluation uses the first {evaluated})"
        if len(text.held_out)
        else "none held out (too short)"
    )
    plural = "s" if world.size > 1 else ""
    return (
        f"zmpi {__version__}: {args.model}, {parameters:,} parameters, stage {zero.stage.number} on {world.size} rank{plural},"
        f" {zero.policy.recipe.describe(len(zero.optimizer.moments))}\n"
        f"{_where(world)}, reduction {zero.comm.reduction},"
        f" {world.threads} thread(s) per rank, {world.library}\n"
        f"data {args.data}: {len(text.train):,} tokens for training, {held_out}; a step is"
        f" {args.micro_batch} x {args.accumulate} x {world.size} sequences (micro-batch x accumulate x ranks)"
    )


def _where(world):
    """Device and transport, and the reason where they were chosen for the user."""
    device = f"device {world.device.name}" + (
        f" (auto: {world.device.why})" if world.device.why else ""
    )
    return f"{device}, transport {world.transport}" + (
        f" ({world.transport_why})" if world.transport == "staged" else ""
    )


def summary(zero, log, seconds):
    """The end of a run: losses, speed, and bytes and elements beside their formulas. `seconds` is the median step's."""
    last, evaluation = log.last, log.last_evaluation
    layouts = [unit.layout for unit in zero.units.values()]
    sizes = {layout.name: layout.elements for layout in layouts}
    padded, moments = sum(layout.padded for layout in layouts), len(zero.optimizer.moments)
    formula = state_bytes(zero.stage, padded, zero.comm.shards, zero.policy.recipe, moments)
    moved = elements_moved(
        zero.stage, zero.schedule, sizes, zero.last.micro_batches, zero.comm.ordered
    )
    held_out = f"; validation {evaluation['val_loss']:.4f}" if evaluation else ""
    lines = [
        f"loss    training {last['loss']:.4f} at step {last['step']}{held_out} (nat per token)",
        f"speed   {last['tokens'] / seconds:,.0f} tokens/s (median step {seconds * 1e3:.1f} ms)",
        f"{'bytes per rank':24}{'formula':>16}{'measured, lowest and highest rank':>36}",
    ]
    for kind in OWNED:
        lines.append(f"  {kind:22}{formula[kind]:>16,}{_range(last['memory'][kind]):>36}")
    for kind, name in (
        ("full_peak", "gathered, at peak"),
        ("work", "work buffers, at peak"),
        ("peak", "process, at peak"),
    ):
        lines.append(f"  {name:22}{'':>16}{_range(last['memory'][kind]):>36}")
    lines.append(f"{'elements per step':24}{'formula':>16}{'measured, rank 0':>36}")
    for kind, expected in moved.items():
        lines.append(f"  {kind:22}{expected:>16,}{last['comm'][kind]['elements']:>36,}")
    return "\n".join(lines)


def _range(values):
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"
