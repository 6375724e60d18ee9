"""How long a step takes: each term on its own, with its source.

    layers     forward, turn and backward: FLOPs of products, and whatever else layers do for each of them
    update     the optimizer, for each element that this rank updates
    ends       before and after messages: widening, rounding, adding up, for each element moved
    Python     between two verbs, for each visit of a layer
    messages   each call's latency and its bytes, by its size
    skew       waiting for the slowest rank, as a share of what the ranks compute

All but messages come from one zmpi.bench --json (seconds by verb, of all ranks); messages from one zmpi.doctor --json of
the same world, else from what the bench was blocked. From --flops and --bandwidth come layers and messages alone.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import mean, median

COMPUTE_TERMS = ("layers", "update", "ends", "Python")


@dataclass(frozen=True)
class Speed:
    """What a rank can do. Seconds for each; 0 where it is not known, and then left out of a step's time."""

    flops: float  # FLOPs of products in a second
    bandwidth: float = inf  # bytes sent in a second, where there are no `links`
    update_s: float = 0.0  # for an element that is updated
    ends_s: float = 0.0  # for an element that is moved
    visit_s: float = 0.0  # for a visit
    skew: float = 0.0  # seconds waited for a second of computing
    links: dict | None = None  # {collective: [(bytes sent in a call, seconds), ...]}, rising

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
        waited = self.skew if self.links else 0.0  # what a bench was blocked has the skew in it
        return terms | {"skew": waited * sum(terms[term] for term in COMPUTE_TERMS)}

    def compute_s(self, walk):
        """Seconds of a step in which this rank computes."""
        terms = self.terms(walk)
        return sum(terms[term] for term in COMPUTE_TERMS)

    def comm_s(self, walk):
        """Seconds of a step's messages, and of waiting for the slowest rank."""
        terms = self.terms(walk)
        return terms["messages"] + terms["skew"]

    def _call_s(self, walk, kind, entry):
        """Seconds of all calls that one ledger entry counts."""
        if not entry.bytes_sent:
            return 0.0
        points = (self.links or {}).get(_collective(walk, kind))
        if not points:
            return entry.bytes_sent / self.bandwidth
        return entry.calls * along(points, entry.bytes_sent / entry.calls)


def _collective(walk, kind):
    """What the doctor calls it. Scalars are gathered."""
    if kind == "reduce_scatter":
        return "reduce_scatter_ordered" if walk.reduce_each else "reduce_scatter_mpi"
    return "all_gather"


def along(points, nbytes):
    """Seconds for so many bytes, on straight lines between measured points; the first and last line go on."""
    if len(points) == 1:
        return points[0][1] * nbytes / points[0][0]
    pairs = list(pairwise(points))
    around = (pair for pair in pairs if nbytes <= pair[1][0])
    (low, at_low), (high, at_high) = next(around, pairs[-1])
    seconds = at_low + (at_high - at_low) * (nbytes - low) / (high - low)
    return max(seconds, 0.0)


def speed_of(report):
    """The Speed that a bench's JSON measured: for each term the median over its stages of the mean over ranks.

    Raises ValueError, or what Python has for a wrong type or a missing key, where it holds none.
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
    """{collective: [(bytes sent in a call, seconds), ...]} of a doctor's JSON.

    Raises ValueError, or what Python has for a wrong type or a missing key, where it holds none.
    """
    links = {}
    for name, points in report["links"].items():
        links[name] = sorted((float(nbytes), float(seconds)) for nbytes, seconds in points)
        if not links[name] or any(not (0 < x < inf) for point in links[name] for x in point):
            raise ValueError(name)
    return links


def ranks_that_pay(setting, stage, speed):
    """(ranks, whether they were found): at the same global batch, the fewest ranks at which messages take as long as computing.

    With fewer, another rank saves more arithmetic than it adds in messages. The global batch is divided further and further:
    first over micro-batches, then over the sequences in one; one sequence per rank is the end of it.
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
