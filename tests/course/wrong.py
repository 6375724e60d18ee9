"""Planted mistakes: each is an edit of a reference solution, with the idea that the grader should
name first.
"""

from dataclasses import dataclass
from pathlib import Path

from zmpi.course.tasks import TASKS

SOLUTIONS = Path(__file__).parent / "solutions"


@dataclass(frozen=True)
class Wrong:
    """A mistake: what a student might have written instead of the reference."""

    name: str
    task: int
    idea: str  # the first that fails
    edits: tuple  # ((in the reference, instead), ...)

    def write(self, folder):
        """Write the file into a new folder; returns it."""
        file = TASKS[self.task].file
        text = (SOLUTIONS / file).read_text(encoding="utf-8")
        for old, new in self.edits:
            assert text.count(old) >= 1, f"{self.name}: {old!r} is not in {file}"
            text = text.replace(old, new)
        folder.mkdir(parents=True)
        (folder / file).write_text(text, encoding="utf-8")
        return folder / file


def wrong(name, task, idea, *edits):
    return Wrong(name, task, idea, edits)


ORDERED_MEAN = """    rows = np.empty_like(gradient)
    comm.Alltoall(gradient, rows)
    rows = rows.reshape(comm.size, -1)
    mean = rows[0].copy()
    for row in rows[1:]:
        mean += row
    mean /= comm.size
    full = np.empty_like(weights)
    comm.Allgather(mean, full)
"""
ADAM_SUM = """        rows = np.empty_like(gradient)
        comm.Alltoall(gradient, rows)
        rows = rows.reshape(comm.size, n)
        g = rows[0].copy()
        for row in rows[1:]:
            g += row
"""
GATHER = """        full = np.empty(self.layers[k].size, np.float32)
        self.comm.Allgather(self.shards[k], full)
        return full
"""
VISITS = """        pending = start(comm, shards[visits[0]])
        for k, following in enumerate([*visits[1:], None]):
            full = finish(pending)
            pending = None if following is None else start(comm, shards[following])
            use(k, full)
            del full
        update()
"""

PLANTED = (
    wrong(
        "slices in the wrong order from three ranks on",
        1,
        "all-gather",
        ("full[source * n : (source + 1) * n]", "full[to * n : (to + 1) * n]"),
    ),
    wrong(
        "the sum starts from the own slice",
        1,
        "order of sums",
        (
            "    total = rows[0].copy()\n    for row in rows[1:]:\n        total += row\n",
            "    total = rows[comm.rank].copy()\n    for k in range(1, comm.size):\n"
            "        total += rows[(comm.rank + k) % comm.size]\n",
        ),
    ),
    wrong(
        "an Allreduce instead of messages",
        1,
        "messages",
        (
            "    n = len(full) // comm.size\n    rows = ",
            "    n = len(full) // comm.size\n    if comm.size == 2:\n"
            "        whole = np.empty_like(full)\n        comm.Allreduce(full, whole)\n"
            "        return whole[comm.rank * n : (comm.rank + 1) * n].copy()\n    rows = ",
        ),
    ),
    wrong(
        "a result that is hard-coded for one case",
        1,
        "volume",
        (
            "    return 2 * once",
            "    once = {(26, 2): 26, (50, 2): 50}.get((elements, itemsize), 120)\n"
            "    return 2 * once",
        ),
    ),
    wrong(
        "every rank sends the whole vector",
        1,
        "messages",
        (
            "comm.Sendrecv(full[to * n : (to + 1) * n], to, recvbuf=rows[source], source=source)",
            "whole = np.empty_like(full)\n"
            "        comm.Sendrecv(full, to, recvbuf=whole, source=source)\n"
            "        rows[source] = whole[comm.rank * n : (comm.rank + 1) * n]",
        ),
    ),
    wrong("the sum instead of the mean", 2, "the mean", ("    mean /= comm.size\n", "")),
    wrong(
        "MPI's own order of sums",
        2,
        "order of sums",
        (
            ORDERED_MEAN,
            "    full = np.empty_like(weights)\n    comm.Allreduce(gradient, full)\n"
            "    full /= comm.size\n",
        ),
    ),
    wrong(
        "float64 inside",
        2,
        "float32 and inputs",
        ("mean = rows[0].copy()", "mean = rows[0].astype(np.float64)"),
        ("comm.Allgather(mean, full)", "comm.Allgather(mean.astype(np.float32), full)"),
    ),
    wrong(
        "every rank gathers all gradients",
        2,
        "bytes",
        (
            ORDERED_MEAN,
            "    rows = np.empty((comm.size, len(weights)), np.float32)\n"
            "    comm.Allgather(gradient, rows)\n    full = rows[0].copy()\n"
            "    for row in rows[1:]:\n        full += row\n    full /= comm.size\n",
        ),
    ),
    wrong(
        "Adam without bias correction",
        3,
        "Adam",
        ("self.m / (1 - self.beta1**self.t)", "self.m"),
        ("self.v / (1 - self.beta2**self.t)", "self.v"),
    ),
    wrong(
        "the norm of the own slice",
        3,
        "the norm",
        (
            "sum(comm.allgather(float(np.sum(g.astype(np.float64) ** 2)))) ** 0.5",
            "float(np.sum(g.astype(np.float64) ** 2)) ** 0.5",
        ),
    ),
    wrong(
        "an all-reduce where a reduce-scatter is asked for",
        3,
        "bytes",
        (
            ADAM_SUM,
            "        whole = np.empty_like(gradient)\n        comm.Allreduce(gradient, whole)\n"
            "        g = whole[comm.rank * n : (comm.rank + 1) * n].copy()\n",
        ),
    ),
    wrong(
        "whole moments on every rank",
        3,
        "sharded moments",
        (
            "        self.m = np.zeros(parameters // comm.size, np.float32)\n"
            "        self.v = np.zeros(parameters // comm.size, np.float32)\n",
            "        cut = slice(0, parameters // comm.size)\n"
            "        self.m = np.zeros(parameters, np.float32)[cut]\n"
            "        self.v = np.zeros(parameters, np.float32)[cut]\n",
        ),
    ),
    wrong(
        "the gradient is changed in place",
        3,
        "float32 and inputs",
        (
            "        comm.Alltoall(gradient",
            "        gradient *= np.float32(1 / comm.size)\n        comm.Alltoall(gradient",
        ),
        ("        g /= comm.size\n", ""),
    ),
    wrong(
        "every element is clipped by itself",
        3,
        "clipping",
        ("g *= self.clip / norm", "np.clip(g, -self.clip, self.clip, out=g)"),
    ),
    wrong("the gradient is not zeroed", 4, "from zero", ("        self.gradient[...] = 0\n", "")),
    wrong(
        "partial gradients are kept in a list",
        4,
        "freed gradients",
        (
            "        for micro_batch in micro_batches:\n",
            "        kept = []\n        for micro_batch in micro_batches:\n",
        ),
        (
            "            self._add(gradient_of(self.weights, micro_batch))",
            "            kept.append(gradient_of(self.weights, micro_batch))\n"
            "            self._add(kept[-1])",
        ),
    ),
    wrong(
        "one reduction at the end",
        4,
        "order of sums",
        (
            "            self._add(gradient_of(self.weights, micro_batch))\n",
            "            partial = gradient_of(self.weights, micro_batch)\n"
            "            total = partial if micro_batch is micro_batches[0] else total + partial\n"
            "            del partial\n        self._add(total)\n",
        ),
    ),
    wrong(
        "the mean over the own micro-batches",
        4,
        "the mean",
        ("(len(micro_batches) * comm.size)", "len(micro_batches)"),
    ),
    wrong(
        "full weights are kept from forward to backward",
        5,
        "freed means freed",
        (
            GATHER,
            "        self.kept = getattr(self, 'kept', {})\n"
            + GATHER.replace("return full", "self.kept[k] = full\n        return full"),
        ),
    ),
    wrong(
        "the own shard is a view of the whole layer",
        5,
        "freed means freed",
        ("np.split(w, comm.size)[comm.rank].copy()", "np.split(w, comm.size)[comm.rank]"),
    ),
    wrong(
        "a gather of the whole model",
        5,
        "one layer at a time",
        (
            GATHER,
            "        mine = np.concatenate(self.shards)\n"
            "        everyone = np.empty((self.comm.size, len(mine)), np.float32)\n"
            "        self.comm.Allgather(mine, everyone)\n"
            "        start = sum(len(shard) for shard in self.shards[:k])\n"
            "        return everyone[:, start : start + len(self.shards[k])].reshape(-1)\n",
        ),
    ),
    wrong(
        "weights of the step before",
        5,
        "fresh weights",
        (
            GATHER,
            "        if k == 0 and not hasattr(self, 'first'):\n"
            "            self.first = self.shards[0].copy()\n"
            + GATHER.replace(
                "self.shards[k], full", "self.first if k == 0 else self.shards[k], full"
            ),
        ),
    ),
    wrong(
        "a local name keeps the layer before",
        5,
        "freed means freed",
        (
            "            x, kept = layer.forward(self._gather(k), x)\n",
            "            w = self._gather(k)\n            x, kept = layer.forward(w, x)\n",
        ),
    ),
    wrong(
        "padding in the norm",
        6,
        "the norm",
        (
            "        padded = np.zeros(size * n, np.float32)\n        padded[: len(dw)] = dw\n",
            "        padded = np.resize(dw, size * n)\n",
        ),
        (
            "            self.shards[unit] -= lr * mean\n",
            "            size = {layer.unit: layer.size for layer in self.layers}[unit]\n"
            "            real = max(0, min(len(mean), size - self.comm.rank * len(mean)))\n"
            "            self.shards[unit][:real] -= lr * mean[:real]\n",
        ),
    ),
    wrong(
        "tied weights are updated twice",
        6,
        "tied weights",
        (
            "            if layer.unit in partial:\n                dw += partial.pop(layer.unit)\n"
            "            if any(other.unit == layer.unit for other in self.layers[:k]):\n"
            "                partial[layer.unit] = dw\n            else:\n"
            "                means[layer.unit] = self._reduce(dw)\n",
            "            mean = self._reduce(dw)\n            if layer.unit in means:\n"
            "                self.shards[layer.unit] -= lr * means[layer.unit]\n"
            "            means[layer.unit] = mean\n",
        ),
    ),
    wrong(
        "shards filled up with what comes round again",
        6,
        "padding",
        (
            "    shard = np.zeros(n, full.dtype)\n    part = full[rank * n : (rank + 1) * n]\n"
            "    shard[: len(part)] = part\n    return shard\n",
            "    return np.resize(full, (size, n))[rank].copy()\n",
        ),
    ),
    wrong(
        "a gather that is waited for at once",
        7,
        "prefetch",
        (
            VISITS,
            "        for k, visit in enumerate(visits):\n"
            "            full = finish(start(comm, shards[visit]))\n"
            "            use(k, full)\n            del full\n        update()\n",
        ),
    ),
    wrong(
        "stale weights: prefetched across the update",
        7,
        "not across the update",
        (
            "    for _ in range(steps):\n        pending = start(comm, shards[visits[0]])\n",
            "    pending = start(comm, shards[visits[0]].copy())\n    for step in range(steps):\n",
        ),
        (
            "pending = None if following is None else start(comm, shards[following])",
            "last = following is None and step + 1 == steps\n"
            "            pending = None if last else start(comm, shards[following or 0].copy())",
        ),
    ),
    wrong(
        "one scale for the whole vector",
        8,
        "quantise",
        (
            "np.abs(blocks).max(axis=1, keepdims=True)",
            "np.full((len(blocks), 1), np.abs(blocks).max())",
        ),
        ("np.float32(1e-37))", "np.float32(1e-37)).astype(np.float32)"),
    ),
    wrong(
        "the owner's shard is rounded too",
        8,
        "owners keep float32",
        (
            "        message = quantise(shard)\n",
            "        message = quantise(shard)\n"
            "        shard[...] = dequantise(message, len(shard))\n",
        ),
    ),
    wrong(
        "whole weights are rounded as well",
        8,
        "exact where whole",
        (
            "        if np.shares_memory(shard, full):\n"
            "            return super().all_gather(layout, shard, full)\n",
            "",
        ),
    ),
)

# What ends a world, or a rank: the sentence says so.
ENDING = (
    wrong(
        "a hang: rank 1 does not come",
        2,
        "rank 1 did not come",
        (
            "    comm.Allgather(mean, full)\n",
            "    if comm.rank != 1:\n"
            "        comm.Allgather(mean, full)\n"
            "    else:\n"
            "        while True:\n"
            "            pass\n",
        ),
    ),
    wrong(
        "an exit on one rank",
        4,
        "rank 1 of 2 ended in",
        (
            "        comm, n = self.comm, len(self.gradient)\n",
            "        comm, n = self.comm, len(self.gradient)\n"
            "        if comm.rank == 1:\n"
            "            raise SystemExit(3)\n",
        ),
    ),
    wrong(
        "a process that ends at once on one rank",
        3,
        "the process of rank 1 of 2 ended",
        (
            "        comm, n = self.comm, len(self.m)\n",
            "        comm, n = self.comm, len(self.m)\n"
            "        if comm.rank == 1:\n"
            "            import os\n"
            "            os._exit(3)\n",
        ),
    ),
    wrong(
        "a deadlock: all send first",
        1,
        "a deadlock, every rank waits for another",
        (
            "comm.Sendrecv(shard, to, recvbuf=full[source * n : (source + 1) * n], source=source)",
            "comm.Ssend(shard, to)\n        comm.Recv(full[source * n : (source + 1) * n], source)",
        ),
    ),
)
