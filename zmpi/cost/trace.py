"""The timeline of an engine, one lane per rank: Chrome trace events (for Perfetto), or text."""

import json
import re
from collections import deque
from pathlib import Path
from time import perf_counter

from zmpi.cost.watch import Watch
from zmpi.process.output import Output
from zmpi.process.table import in_columns

KEPT_STEPS = 100  # a trace keeps the last ones, so that it does not grow with the run
CLOCK_ROUNDS = 20  # messages to compare two clocks
COMPUTING_VERBS = ("forward", "turn", "backward")
AMOUNTS = ("elements", "bytes_sent", "blocked_s")


class Trace(Watch):
    """A ledger that records when each verb ran, as dictionaries.

    {"step", "verb", "name", "start", "end"} (seconds on this rank's clock), and the amounts that
    the ledger booked meanwhile.
    """

    def __init__(self):
        super().__init__()
        self.steps = deque(maxlen=KEPT_STEPS)  # lists of events, in order of their starts
        self._under_way = []

    def begin_step(self):
        super().begin_step()
        number = self.steps[-1][0]["step"] + 1 if self.steps else 1
        self.steps.append(
            [
                {
                    "step": number,
                    "verb": "step",
                    "name": str(number),
                    "start": perf_counter(),
                    "end": None,
                }
            ]
        )

    def began(self):
        verb, name = self.place
        event = {
            "step": self._step(),
            "verb": verb,
            "name": name,
            "start": perf_counter(),
            "end": None,
        }
        self._under_way.append(event)
        if self._recording():
            self.steps[-1].append(event)

    def ended(self):
        end = perf_counter()
        self._under_way.pop()["end"] = end
        if self._recording():
            self.steps[-1][0]["end"] = end

    def book(self, kind, unit, **amounts):
        """Also add the amounts to the current event; outside any, they are their own event."""
        super().book(kind, unit, **amounts)
        if self._under_way:
            event = self._under_way[-1]
        elif self._recording():
            end = perf_counter()
            event = {
                "step": self._step(),
                "verb": "agree",
                "name": unit,
                "start": end - amounts["blocked_s"],
                "end": end,
            }
            self.steps[-1].append(event)
        else:
            return
        for amount in AMOUNTS:
            if amounts.get(amount):
                event[amount] = event.get(amount, 0) + amounts[amount]

    def events(self):
        """All events of the kept steps."""
        return [event for step in self.steps for event in step if event["end"] is not None]

    def _recording(self):
        return self.steps and not self._as_other  # an evaluation is not part of a step

    def _step(self):
        return self.steps[-1][0]["step"] if self.steps else 0


def by_verb(events):
    """{verb: seconds} of a step's events, which add up to the step.

    Without the time blocked in messages, which is "blocked", for all verbs together. "other" is
    Python between verbs.
    """
    step, *rest = events
    found = {"blocked": 0.0}
    for event in rest:
        blocked = event.get("blocked_s", 0.0)
        seconds = event["end"] - event["start"] - blocked
        found[event["verb"]] = found.get(event["verb"], 0.0) + seconds
        found["blocked"] += blocked
    found["other"] = step["end"] - step["start"] - sum(found.values())
    return found


def gathers_under_way(events):
    """{"gathers", "during_products", "bytes"} of a step.

    All gathers, those in progress while a layer computed, and the bytes that this rank sent in
    these. Counted from the order of events, so the same in every run.
    """
    started, during, sent, gathers = {}, 0, 0, 0
    for event in events:
        if event["verb"] == "gather":
            gathers += 1
            started[event["name"]] = [event, False]
        elif event["verb"] in COMPUTING_VERBS:
            for entry in started.values():
                entry[1] = True
        elif event["verb"] == "wait":
            gather, computed = started.pop(event["name"])
            during += computed
            sent += gather.get("bytes_sent", 0) if computed else 0
    return {"gathers": gathers, "during_products": during, "bytes": sent}


def open_trace(path):
    """The Output of --trace; ValueError for a file name that is not a trace's."""
    kinds = {".json": r'{"traceEvents": ', ".txt": r"rank \d+  .* ms$"}  # as their first lines are
    suffix = Path(path).suffix
    if suffix not in kinds:
        raise ValueError(f"--trace: expected a file name ending in .json or .txt, got {path}")
    own = re.compile(kinds[suffix].encode())
    return Output("--trace", path, own.match, "a trace of zmpi.train")


def write_trace(output, zero):
    """Write the engine's Trace to rank 0's Output. Collective; raises UsageError on all ranks."""
    lanes = aligned(zero.world, zero.ledger.events())
    with zero.world.agreed():
        if zero.world.rank == 0:
            text = Path(output.path).suffix == ".txt"
            output.replace(as_text(lanes) if text else json.dumps(as_chrome(lanes)))


def aligned(world, events):
    """Every rank's events, in seconds since the first of all; None except on rank 0. Collective.

    Clocks differ between nodes: each is aligned by the fastest of several round trips to rank 0.
    """
    offset = _clock_offset(world)
    mine = [
        {**event, "start": event["start"] - offset, "end": event["end"] - offset}
        for event in events
    ]
    with world.guard.waiting("the trace's events"):
        lanes = world.mpi.gather(mine)
    if lanes is None:
        return None
    zero = min((event["start"] for lane in lanes for event in lane), default=0.0)
    return [
        [{**event, "start": event["start"] - zero, "end": event["end"] - zero} for event in lane]
        for lane in lanes
    ]


def _clock_offset(world):
    """Seconds by which this rank's clock is ahead of rank 0's."""
    with world.guard.waiting("the clocks"):  # all messages: every rank counts one wait
        if world.rank:
            for _ in range(CLOCK_ROUNDS):
                world.mpi.recv(source=0)
                world.mpi.send(perf_counter(), dest=0)
            return world.mpi.recv(source=0)
        for rank in range(1, world.size):
            rounds = []
            for _ in range(CLOCK_ROUNDS):
                sent = perf_counter()
                theirs = world.mpi.sendrecv(None, dest=rank, source=rank)
                back = perf_counter()
                rounds.append((back - sent, theirs - (sent + back) / 2))
            world.mpi.send(min(rounds)[1], dest=rank)
    return 0.0


def as_chrome(lanes):
    """Chrome's trace event format: complete events ("X") in microseconds, one thread per rank."""
    events = []
    for rank, lane in enumerate(lanes):
        events.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"rank {rank}"},
            }
        )
        for event in lane:
            start, seconds = event["start"], event["end"] - event["start"]
            details = {key: value for key, value in event.items() if key in ("step", *AMOUNTS)}
            what = {
                "name": f"{event['verb']} {event['name']}",
                "cat": event["verb"],
                "ph": "X",
                "pid": 0,
                "tid": rank,
            }
            events.append({**what, "ts": start * 1e6, "dur": seconds * 1e6, "args": details})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def as_text(lanes):
    """The last step, a line for each event of each rank, in the order in which they began."""
    last = max((event["step"] for lane in lanes for event in lane), default=None)
    if last is None:
        return ""
    found = [
        (event["start"], rank, event)
        for rank, lane in enumerate(lanes)
        for event in lane
        if event["step"] == last
    ]
    found.sort(key=lambda entry: entry[:2])
    first, rows = found[0][0], []
    for start, rank, event in found:
        began, took = (start - first) * 1e3, (event["end"] - start) * 1e3
        what = f"{event['verb']} {event['name']}", _said(event, len(lanes))
        rows.append((f"rank {rank}", *what, f"at {began:.2f} ms", f"for {took:.2f} ms"))
    return in_columns(rows, left=3) + "\n"


def _said(event, ranks):
    """The rest of an event's line, after its name."""
    elements = f"{event.get('elements', 0):,} elements"
    blocked = f"{event.get('blocked_s', 0) * 1e3:.2f} ms blocked"
    return {
        "gather": f"{elements} from {ranks} ranks",
        "wait": blocked,
        "reduce": f"{elements} over {ranks} ranks, {blocked}"
        if "elements" in event
        else "kept for the next micro-batch",
        "update": f"then {elements} gathered, {blocked}" if "elements" in event else "",
        "agree": f"{event.get('elements', 0):,} numbers of each rank, {blocked}",
    }.get(event["verb"], "")
