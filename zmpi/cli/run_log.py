"""A run's log, one JSON object per line: a header, each step and evaluation, and how it ended."""

import json
import sys
from math import isfinite

from zmpi import __version__
from zmpi.messages.ledger import OWNED
from zmpi.process.errors import UsageError
from zmpi.process.output import Output

MEMORY_KINDS = (*OWNED, "full_peak", "work", "peak")


class LogLost(UsageError):
    """The log can no longer be written (a full disk, say); raised on all ranks after one step."""


def open_log(path):
    """The Output of --log."""
    return Output("--log", path, _is_log, "a log of zmpi.train")


class RunLog:
    """A run's entries, in an Output (None without --log, or not on rank 0); keeps the last ones.

    A resumed run continues an older log, other runs replace it. Raises ValueError if it cannot be
    written, or is another model's or text's.
    """

    def __init__(self, output, zero, args, argv, data):
        self.zero, self._output = zero, output
        self.last = self.last_evaluation = None
        self._fault = None  # on rank 0: why the log can no longer be written
        if output is None:
            return
        first = header(zero, args, sys.argv if argv is None else argv, data)
        kept = _kept(output, first, zero.step) if args.resume else 0
        output.cut(kept)
        if not kept:
            output.write(_line(first))

    def step(self, seconds):
        """Log the engine's last step, which took `seconds`. Collective: gathers all ranks' memory.

        Raises LogLost if an earlier entry could not be written.
        """
        zero, step = self.zero, self.zero.last
        comm, memory = zero.ledger["comm"], zero.ledger["memory"]
        everyone = self._shared(memory)
        self.last = {
            "step": zero.step,
            "loss": json_number(step.loss),
            "grad_norm": json_number(step.grad_norm),
            "lr": step.lr,
            "tokens": step.tokens,
            "step_s": seconds,
            "tokens_per_s": step.tokens / seconds,
            "optimizer_t": zero.updates,
            "loss_scale": step.loss_scale,
            "skipped": int(step.skipped),
            "comm": comm,
            "memory": {kind: [mine[kind] for mine in everyone] for kind in MEMORY_KINDS},
        }
        self._write(self.last)

    def evaluation(self, loss, tokens):
        """Log a held-out loss over this number of targets."""
        self.last_evaluation = {
            "step": self.zero.step,
            "val_loss": json_number(loss),
            "val_tokens": tokens,
        }
        self._write(self.last_evaluation)

    def end(self, how):
        """Log how the run ended, and how many of its steps updated nothing."""
        zero = self.zero
        self._write({"step": zero.step, "end": how, "skipped_steps": zero.step - zero.updates})

    def settle(self):
        """Raise LogLost on all ranks if an entry could not be written. Collective."""
        self._shared(None)

    def _shared(self, value):
        """Every rank's value; the same message says whether the log is still written."""
        everyone = self.zero.world.share((value, self._fault), "the log's entry")
        if everyone[0][1] is not None:
            raise LogLost(everyone[0][1])
        return [mine for mine, _ in everyone]

    def _write(self, entry):
        if self._output is None or self._fault is not None:
            return
        try:
            self._output.write(_line(entry))
        except ValueError as error:
            self._fault = str(error)


def json_number(value):
    """A number for JSON: null if it is not finite."""
    return value if isfinite(value) else None


def _line(entry):
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _is_log(head):
    """Whether a file starts with a log's entry: any entry, if the log was rotated."""
    entry = _entry(head.partition(b"\n")[0])
    marks = {"unit_sizes", "optimizer_t", "val_loss", "end"}  # one of them is in every entry
    return bool({"zmpi", "step"} & entry.keys() and marks & entry.keys())


def _entry(line):
    """The JSON object in a line, or {}."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _kept(output, first, step):
    """Bytes of a log to keep when resuming after `step`: a killed run may have logged more."""
    kept = 0
    for line in output.lines():
        entry = _entry(line)
        if "unit_sizes" in entry and _subject(entry) != _subject(first):
            raise ValueError(
                f"--log: {output.path} is the log of another model or text; choose another file"
            )
        logged = entry.get("step", 0)
        if not line.endswith(b"\n") or (isinstance(logged, int) and logged > step):
            break
        kept += len(line)
    return kept


def _subject(header):
    """The model and the text of a run, by its header; the text's path may differ."""
    data = header.get("data") or {}
    return header["unit_sizes"], [data.get(name) for name in ("tokens", "kind", "crc32")]


def header(zero, args, argv, data):
    """The log's first line. `data`: identifies the text."""
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
        "group": zero.world.group,
    }
