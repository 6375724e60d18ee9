"""Makes step.html: one training step at stage 3, event by event, from a real trace of it.

Run:        mpirun -n 4 python examples/course/make_step.py examples/course/step.html

Nothing on the page is made up. What was done when, and what was sent, is the engine's trace; what
each rank holds after each event is the ledger's: an array counts as long as its memory lives. The
page's layout and its script are step_layout.html; this file adds the trace, as JSON.
"""

import json
import sys
import weakref
from collections import Counter
from inspect import getsource
from pathlib import Path

from models import GPT
from models.layer import unit_of
from zmpi import AdamW, World, ZeRO
from zmpi.core.unit import Unit
from zmpi.cost.trace import Trace, aligned
from zmpi.cost.watch import watched
from zmpi.messages.ledger import OWNED
from zmpi.text.data import Batches, load_text

STEP = 3  # the step that is shown: the first ones also allocate what is kept
LAYOUT = Path(__file__).with_name("step_layout.html")
PLACE = "/* the trace */ null"  # in the layout's script
LINES = {  # a verb: the line of zmpi/core/engine.py that does it
    "gather": "self.units[visit.unit].gather()",
    "prefetch": "self.units[visit.next].gather()",
    "wait": "w = self.units[visit.unit].weights() if visit.weights else {}",
    "forward": "x, kept[layer] = layer.forward(w, x)",
    "turn": "loss_sum, dx = self.turn(self.model, w, dw, x, targets, divisor)",
    "backward": "dx = layer.backward(w, dw, kept.pop(layer), dx)",
    "free": "self.units[visit.unit].free()",
    "reduce": "self.units[visit.unit].reduce()",
    "open": "counted = self._open(micro_batches)",
    "agree": "self.last = self._agree(losses, counted)",
    "update": "unit.update(self.optimizer, self.updates, factor)  # each rank its own shard",
}


class Holdings(Trace):
    """A trace whose events also say what this rank holds after them: {"unit kind": bytes}."""

    def __init__(self):
        super().__init__()
        self.unit = None  # whose arrays are being made
        self.held = Counter()

    def track(self, kind, array):
        """Count the array as held by the unit until its memory is given back."""
        held = f"{self.unit or 'all'} {kind}"
        self.held[held] += array.nbytes
        weakref.finalize(array, self._gone, held, array.nbytes).atexit = False
        return super().track(kind, array)

    def ended(self):
        super().ended()
        self._note()

    def book(self, kind, unit, **amounts):
        super().book(kind, unit, **amounts)
        self._note()

    def _note(self):
        if self.steps:
            self.steps[-1][-1]["held"] = {held: n for held, n in self.held.items() if n}

    def _gone(self, held, nbytes):
        self.held[held] -= nbytes


class NamedUnit(Unit):
    """A unit that tells the ledger whose arrays are being made."""

    def __init__(self, layout, shared):
        shared.ledger.unit = layout.name
        super().__init__(layout, shared)

    def gather(self):
        self.shared.ledger.unit = self.layout.name
        super().gather()

    def partial(self):
        self.shared.ledger.unit = self.layout.name
        return super().partial()


class NamedZeRO(ZeRO):
    """The engine, with units that give their names."""

    make_unit = NamedUnit


def traced(world):
    """The engine after STEP steps; on rank 0, every rank's events of the last one, else None."""
    text = load_text("builtin", 32, 256)
    batches = Batches(text, world.rank, world.size, micro_batch=4, last_only=False)
    model = GPT(layers=2, width=64, heads=4, context=32, vocab=256)
    optimizer = AdamW(lr=3e-3, clip=1.0)
    zero = watched(NamedZeRO, Holdings)(model, world, stage=3, optimizer=optimizer, seed=0)
    for step in range(1, STEP + 1):
        zero.train_step(batches.of_step(0, step, 1))
    return zero, aligned(world, zero.ledger.steps[-1])


def page(zero, lanes):
    """The page's text."""
    layout = LAYOUT.read_text(encoding="utf-8")
    assert layout.count(PLACE) == 1
    text = json.dumps(shown(zero, lanes), separators=(",", ":")).replace("</", "<\\/")
    return layout.replace(PLACE, text)


def shown(zero, lanes):
    """What the page shows, as JSON: the world, its units, and a frame for each event."""
    lanes = [[event for event in lane if event["verb"] != "step"] for lane in lanes]
    orders = [[(event["verb"], event["name"]) for event in lane] for lane in lanes]
    assert all(order == orders[0] for order in orders), "the ranks do the same, in the same order"
    layouts = {name: unit.layout for name, unit in zero.units.items()}
    psi = sum(layout.elements for layout in layouts.values())
    walk = Walk(zero, lanes)
    return {
        "ranks": len(lanes),
        "step": STEP,
        "parameters": psi,
        "units": {
            name: {"elements": of.elements, "shard": of.shard_length}
            for name, of in layouts.items()
        },
        "model": "GPT of 2 blocks, width 64, context 32",
        "frames": [walk.frame(number) for number in range(len(lanes[0]))],
    }


class Walk:
    """The events of all ranks, turned into frames in order."""

    def __init__(self, zero, lanes):
        self.lanes, self.size = lanes, len(lanes)
        layers = zero.model.layers
        self.unit_of = {layer.name: unit_of(layer) for layer in layers}
        self.idle = {layer.name for layer in layers if not layer.backward_needs_weights}
        self.layouts = {name: unit.layout for name, unit in zero.units.items()}
        self.coming, self.summed, self.updated = set(), set(), set()
        self.moved = 0  # elements of vectors, so far

    def frame(self, number):
        """What is shown of an event; frames must be asked for in order."""
        events = [lane[number] for lane in self.lanes]
        verb, name = events[0]["verb"], events[0]["name"]
        unit = self.unit_of.get(name, name if name in self.layouts else None)
        kind = self._kind(number, verb, unit)
        if verb == "gather":
            self.coming.add(unit)
        self.coming -= {unit} if verb == "wait" else set()
        self.summed |= {unit} if verb == "reduce" else set()
        self.updated |= {unit} if verb == "update" else set()
        self.moved += events[0].get("elements", 0) if unit else 0
        title, text = self._words(kind, name, unit, events[0])
        return {
            "verb": verb,
            "unit": unit,
            "title": title,
            "text": text,
            "code": LINES[kind],
            "moved": self.moved,
            "ranks": [self._rank(lane, number, unit) for lane in self.lanes],
        }

    def _kind(self, number, verb, unit):
        """The verb, or which of its two meanings it has here."""
        if verb == "agree":
            return "open" if number == 0 else "agree"
        following = self.lanes[0][number + 1 : number + 2]
        if verb == "gather" and [(e["verb"], e["name"]) for e in following] != [("wait", unit)]:
            return "prefetch"
        return verb

    def _rank(self, lane, number, unit):
        """One rank's part in an event: its time, what it sent, and what it holds after it."""
        event = lane[number]
        before = lane[number - 1]["held"] if number else event["held"]
        states = {}
        for name in self.layouts:
            full, was_full = (held.get(f"{name} full") for held in (event["held"], before))
            partial, was = (held.get(f"{name} partial") for held in (event["held"], before))
            weights = "coming" if name in self.coming else "full"
            weights = weights if full else "freed" if was_full else "shard"
            gradient = "partial" if partial else "sent" if was else None
            gradient = gradient or ("summed" if name in self.summed else "old")
            states[name] = [weights, gradient, "new" if name in self.updated else "old"]
        alive = Counter()
        for held, nbytes in event["held"].items():
            kind = held.split()[-1]
            alive["owned" if kind in OWNED else kind] += nbytes
        return {
            "us": round((event["end"] - event["start"]) * 1e6),
            "sent": event.get("bytes_sent", 0),
            "held": alive,
            "units": states,
        }

    def _words(self, kind, name, unit, event):
        """(title, sentences) of an event."""
        others, layout = self.size - 1, self.layouts.get(unit)
        shard = layout and f"{layout.shard_length:,}"
        whole = layout and f"{layout.padded:,}"
        numbers = event.get("elements", 0)
        needless = " It needs no weights, so none were gathered." if name in self.idle else ""
        return {
            "open": (
                "The ranks agree on the step",
                f"Each rank tells the others {numbers} numbers: how many micro-batches and targets"
                " it has, and whether it was asked to stop. Every rank holds its own shard of"
                " everything, and nothing else.",
            ),
            "gather": (
                f"gather {unit}",
                f"Each rank sends its shard of {unit}, {shard} numbers, to the {others} others."
                f" Memory for the full vector, {whole} numbers, is there; it has not arrived.",
            ),
            "prefetch": (
                f"gather {unit}, ahead of its use",
                f"Prefetch: the shards of {unit}, {shard} numbers from each rank, travel while the"
                " layer before it is computed. Until that is done two full vectors are alive.",
            ),
            "wait": (
                f"wait for {unit}",
                f"The full vector of {unit} is complete on every rank: {self.size} shards put"
                " together. Now its layer can be computed.",
            ),
            "forward": (
                f"forward {name}",
                f"Each rank computes layer {name} on its own sequences with the full weights of"
                f" {unit}. Nothing is sent.",
            ),
            "turn": (
                f"turn at {name}: forward, loss, backward",
                f"The last layer's forward, the loss and its backward are one visit. The partial"
                f" gradient of {unit} begins: full length, of this rank's own sequences.",
            ),
            "backward": (
                f"backward {name}",
                f"Each rank adds to its partial gradient of {unit}: full length, and different on"
                f" each rank, as the sequences are.{needless}",
            ),
            "free": (
                f"free {unit}",
                f"The full vector of {unit} is dropped, and its memory given back. Each rank still"
                f" has its own shard; the {others} others' shards are gone.",
            ),
            "reduce": (
                f"reduce {unit}",
                f"Reduce-scatter: each rank sends each owner its {shard} numbers of the partial"
                " gradient. The owner adds them up, and keeps the sum; the partial gradient is"
                " dropped.",
            ),
            "agree": (
                "The ranks agree on loss and norm",
                f"Each rank tells the others {numbers} numbers: its loss, and the sums of squares"
                " of its pieces of the gradient. Now all know the same norm, and clip alike.",
            ),
            "update": (
                f"update {unit}",
                f"Each rank updates its own shard of {unit}, {shard} numbers, from its shard of"
                " the gradient and its own moments m and v. Nothing is sent: the next step"
                " gathers the new weights.",
            ),
        }[kind]


def main():
    source = getsource(ZeRO)
    assert all(line in source for line in LINES.values()), "engine.py has changed: adapt LINES"
    if len(sys.argv) != 2:
        sys.exit("make_step.py: error: expected the page to write, such as step.html")
    world = World(device="cpu")
    zero, lanes = traced(world)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(page(zero, lanes), encoding="utf-8")


if __name__ == "__main__":
    main()
