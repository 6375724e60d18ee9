"""How long a step takes, as separate terms.

    layers    forward, turn and backward: per FLOP of products, including all else in layers
    update    the optimizer: per element that this rank updates
    ends      around messages (widening, rounding, adding up): per element moved
    Python    between two verbs: per visit of a layer
    messages  latency and bytes of each call, by its size
    skew      waiting for the slowest rank: a share of the computing time

A zmpi.bench --json (seconds by verb, of all ranks) gives all but messages; a zmpi.doctor --json of
the same world gives messages, or else the bench's blocked time. --flops and --bandwidth give only
layers and messages.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import mean, median

from zmpi.cost.links import BETWEEN, WITHIN

COMPUTE_TERMS = ("layers", "update", "ends", "Python")


@dataclass(frozen=True)
class Speed:
    """A rank's speed. 0: unknown, and left out of a step's time."""

    flops: float  # FLOPs of products per second
    bandwidth: float = inf  # bytes sent per second, without `links`
    between: float = 0.0  # the same between groups, if it differs
    update_s: float = 0.0  # seconds per element updated
    ends_s: float = 0.0  # seconds per element moved
    visit_s: float = 0.0  # seconds per visit
    skew: float = 0.0  # seconds waited per second of computing
    links: dict | None = None  # {collective: [(bytes sent per call, seconds), ...]}, increasing
    parts: tuple = ()  # the same within a node and between nodes, for the axes of groups

    def terms(self, walk):
        """{term: seconds} of a step."""
        counts = walk.counts
        terms = {
            "layers": counts["flops"] / self.flops,
            "update": counts["updated"] * self.update_s,
            "ends": counts["moved"] * self.ends_s,
            "Python": counts["visits"] * self.visit_s,
            "messages": sum(self._call_s(walk, kind, entry) for kind, entry in walk.messages),
        }
        waited = self.skew if self.links else 0.0  # a bench's blocked time includes the skew
        return terms | {"skew": waited * sum(terms[term] for term in COMPUTE_TERMS)}

    def compute_s(self, walk):
        """Seconds per step in which this rank computes."""
        terms = self.terms(walk)
        return sum(terms[term] for term in COMPUTE_TERMS)

    def comm_s(self, walk):
        """Seconds per step for messages, and for waiting for the slowest rank."""
        terms = self.terms(walk)
        return terms["messages"] + terms["skew"]

    def _call_s(self, walk, kind, entry):
        """Seconds of all calls in one ledger entry."""
        if not entry.bytes_sent:
            return 0.0
        name = _collective(walk, kind)
        if self.parts and kind != "all_reduce" and len(walk.stage.stages) > 1:
            axes = len(walk.stage.stages)
            calls = entry.calls / axes  # both cut a unit into nearly as many chunks
            # The doctor timed one rank per node; here all ranks of a group share its link.
            between = entry.bytes_between * walk.sizes[0]
            sent = entry.bytes_sent - entry.bytes_between, between
            pairs = zip(sent, self.parts, strict=True)
            return sum(calls * along(part[name], nbytes / calls) for nbytes, part in pairs)
        points = (self.links or {}).get(name)
        if not points:
            outer = entry.bytes_between / (self.between or self.bandwidth)
            return (entry.bytes_sent - entry.bytes_between) / self.bandwidth + outer
        return entry.calls * along(points, entry.bytes_sent / entry.calls)


def _collective(walk, kind):
    """The doctor's name for it. Scalars are gathered."""
    if kind == "reduce_scatter":
        return "reduce_scatter_ordered" if walk.reduce_each else "reduce_scatter_mpi"
    return "all_gather"


def along(points, nbytes):
    """Seconds for `nbytes`, interpolated linearly between measured points, and extrapolated."""
    if len(points) == 1:
        return points[0][1] * nbytes / points[0][0]
    pairs = list(pairwise(points))
    around = (pair for pair in pairs if nbytes <= pair[1][0])
    (low, at_low), (high, at_high) = next(around, pairs[-1])
    seconds = at_low + (at_high - at_low) * (nbytes - low) / (high - low)
    return max(seconds, 0.0)


def speed_of(report):
    """The Speed from a bench's JSON: each term's median over stages of its mean over ranks.

    Raises ValueError, TypeError, KeyError or another error if the JSON is not a bench's.
    """
    found = [_of_stage(row) for row in report.get("stages", []) if row.get("counts")]
    sent = [(row["bytes_sent"], row["blocked_s"]) for row in report["stages"] if "error" not in row]
    rates = [nbytes / blocked for nbytes, blocked in sent if nbytes and blocked]
    speed = Speed(
        bandwidth=sorted(rates)[len(rates) // 2],
        **{term: median(stage[term] for stage in found if term in stage) for term in found[0]},
    )
    figures = (
        speed.flops,
        speed.bandwidth,
        speed.update_s,
        speed.ends_s,
        speed.visit_s,
        speed.skew,
    )
    if not all(map(isfinite, figures)) or min(figures) < 0 or not speed.flops * speed.bandwidth:
        raise ValueError(speed)
    return speed


def _of_stage(row):
    """{field of Speed: figure} of one stage's row."""
    verbs = {verb: mean(seconds) for verb, seconds in row["verbs_s"].items()}
    counts = row["counts"]

    def took(*names):
        return sum(verbs.get(name, 0.0) for name in names)

    layers, ends = took("forward", "turn", "backward"), took("gather", "wait", "free", "reduce")
    update, python = took("update"), took("other", "agree")
    waited = sum(mean(seconds) for seconds in row["skew_s"].values())
    return {
        "flops": counts["flops"] / layers,
        "update_s": update / counts["updated"],
        "ends_s": ends / counts["moved"],
        "visit_s": python / counts["visits"],
        "skew": waited / (layers + ends + update + python),
    }


def links_of(report):
    """The `links` and `parts` of a Speed, from a doctor's JSON.

    Raises ValueError, TypeError, KeyError or another error if the JSON is not a doctor's.
    """
    apart = report.get("parts", {})
    parts = [_points(apart[name]) for name in (WITHIN, BETWEEN) if name in apart]
    return {"links": _points(report["links"]), "parts": tuple(parts if len(parts) == 2 else ())}


def _points(links):
    found = {}
    for name, points in links.items():
        found[name] = sorted((float(nbytes), float(seconds)) for nbytes, seconds in points)
        if not found[name] or any(not (0 < x < inf) for point in found[name] for x in point):
            raise ValueError(name)
    return found


def ranks_that_pay(setting, stage, speed):
    """(ranks, whether found): the fewest ranks at which messages take as long as computing.

    Up to there, another rank saves more computing than it adds in messages. The global batch is
    fixed, and divided first over micro-batches, then over the sequences in one, down to one
    sequence per rank.
    """
    batch = setting.micro_batch * setting.accumulate * setting.ranks

    def messages_win(ranks):
        each = max(1, batch // ranks)
        micro_batch = min(setting.micro_batch, each)
        sizes = {"micro_batch": micro_batch, "accumulate": each // micro_batch}
        part = replace(setting, ranks=ranks, **sizes)
        walk = part.walk(stage)
        return speed.comm_s(walk) >= speed.compute_s(walk)

    low, high = 1, batch
    if messages_win(low):
        return low, True
    if not messages_win(high):
        return high, False
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if messages_win(middle) else (middle, high)
    return high, True
