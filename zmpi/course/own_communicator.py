"""Task 8: a communicator of one's own, in zmpi's engine."""

import numpy as np

from models import MLP
from zmpi.core.engine import ZeRO
from zmpi.core.layout import Layout
from zmpi.course.case import Case, Fault, Idea, Task, apart, form, untouched
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import Ledger
from zmpi.numbers.optim import AdamW

_IDEAS = (
    Idea("quantise", 3, "a scale for each block, and at most half a step of error"),
    Idea("gather", 2, "what arrives is every owner's shard, rounded, in rank order"),
    Idea("bytes", 2, "what is declared, what is booked and what MPI carries are one number"),
    Idea("owners keep float32", 1, "only what the others see is rounded"),
    Idea("exact where whole", 1, "weights that a stage keeps whole are sent as they are"),
    Idea("in zmpi", 1, "training with rounded gathers follows training without", needs=("gather",)),
)
_BLOCK, _STEPS = 32, 4
_ROUNDING = 1.001  # a scale is rounded to float32, and so is a product of it
_CLOSE = (
    0.01  # relative, of losses: weights are off by 0.4 % of a block's largest at most, at random
)


def _cases(draw):
    """Vectors alone; then a gather, and training, at 1 to 4 ranks."""
    lengths = [1, _BLOCK, int(draw.integers(33, 64)), int(draw.integers(100, 500))]
    vectors = [
        (draw.standard_normal(n) * 10.0 ** draw.uniform(-6, 3, n)).astype(np.float32)
        for n in lengths
    ]
    vectors += [np.zeros(40, np.float32), np.repeat(np.float32([3, 0, -5]), _BLOCK)]
    found = [Case(1, "vectors", {"vectors": vectors}, ("quantise",))]
    for size in (1, 2, 3, 4):
        elements = int(draw.integers(900, 2000))
        full = draw.standard_normal(elements).astype(np.float32)
        ideas = ("gather", "bytes", "owners keep float32")
        found.append(Case(size, f"a unit of {elements} weights", {"unit": full}, ideas))
    for size in (2, 3):
        sizes = [int(draw.integers(1, 3)), int(draw.integers(9, 16)), 3, 11]
        tokens = draw.integers(0, 11, (_STEPS, size, 8, 4))
        ideas = ("in zmpi", "exact where whole")
        given = {"model": sizes, "tokens": tokens}
        found.append(Case(size, f"an MLP of width {sizes[1]}", given, ideas))
    return found


def _run(student, comm, given, watch):
    """Vectors there and back, one gather, or training at stages 3 and 1 with and without."""
    if "vectors" in given:
        for i, vector in enumerate(given["vectors"]):
            message = student.quantise(vector.copy())
            watch.keep(f"message {i}", message)
            watch.keep(f"vector {i}", student.dequantise(message, len(vector)))
        return
    if "unit" in given:
        _one_gather(student, comm, given["unit"], watch)
        return
    layers, width, context, vocab = given["model"]
    for name, kind in (("own", student.Bytes), ("zmpi's", Communicator)):
        engine = type("Engine", (ZeRO,), {"make_communicator": kind})
        for stage in (3, 1):
            model = MLP(layers, width, context, vocab)
            zero = engine(model, watch.world, stage, AdamW(lr=3e-3), seed=1)
            tokens = given["tokens"][:, comm.rank]
            losses = [zero.train_step([(each[:, :3], each[:, 3])]) for each in tokens]
            watch.keep(f"losses at stage {stage}, {name}", losses)


def _one_gather(student, comm, unit, watch):
    layout = Layout("unit", "", {"w": unit.shape}, comm.size)
    whole = padded(unit, layout.padded)
    shard = watch.untouched("shard", whole[layout.shard(comm.rank)].copy())
    full, own = np.empty_like(whole), student.Bytes(watch.world, Ledger(), "ordered")
    with watch.phase("gather"):
        own.all_gather(layout, shard, full).wait()
    watch.keep("full", full)
    watch.keep("declared_bytes", own.declared_bytes("all_gather", layout, 4, False))
    watch.keep("bytes_sent in the ledger", own.ledger["comm"]["all_gather"]["bytes_sent"])
    watch.keep("in_flight after wait()", own.in_flight)


def padded(unit, length):
    """A unit's vector, filled up with zeros."""
    return np.concatenate([unit, np.zeros(length - len(unit), np.float32)])


def _judge(case, outcomes):
    """Errors within half a step, bytes, and losses."""
    if "vectors" in case.given:
        yield from _vectors(case.given["vectors"], outcomes[0])
    elif "unit" in case.given:
        yield from _gathers(case, outcomes)
    else:
        yield from _losses(outcomes)


def beyond_half_a_step(name, vector, got):
    """The first weight that is further off than half a step of its block, in words; "" where none
    is.
    """
    wrong = form(name, vector, got)
    if wrong or got.dtype != np.float32:
        return wrong or f"{name}: expected float32, got {got.dtype}"
    blocks = np.abs(padded(vector, -(-len(vector) // _BLOCK) * _BLOCK)).reshape(-1, _BLOCK)
    bounds = np.repeat(blocks.max(axis=1) / 127 / 2 * _ROUNDING, _BLOCK)[: len(vector)]
    far = np.flatnonzero(~(np.abs(got - vector) <= bounds))
    if not len(far):
        return ""
    i = int(far[0])
    return (
        f"{name}[{i}]: expected {vector[i]:.6g} within half a step of its block ({bounds[i]:.2g}),"
        f" got {got[i]:.6g}"
    )


def _vectors(vectors, outcome):
    for i, vector in enumerate(vectors):
        name, message = f"{len(vector)} weights there and back", outcome.values[f"message {i}"]
        length = -(-len(vector) // _BLOCK) * (_BLOCK + 4)
        text = form("message", np.zeros(length, np.uint8), message)
        if not text and message.dtype != np.uint8:
            text = f"message: expected uint8, got {message.dtype}"
        text = text or beyond_half_a_step(name, vector, outcome.values.get(f"vector {i}"))
        if text:
            yield Fault("quantise", text)
            return


def _gathers(case, outcomes):
    layout = Layout("unit", "", {"w": case.given["unit"].shape}, case.size)
    whole, length = padded(case.given["unit"], layout.padded), layout.shard_length
    sent = (case.size - 1) * -(-length // _BLOCK) * (_BLOCK + 4)
    for rank, outcome in enumerate(outcomes):
        got = outcome.values.get("full")
        text = form("full", whole, got)
        for owner in range(case.size):
            part = layout.shard(owner)
            text = text or beyond_half_a_step(
                f"rank {owner}'s shard in full", whole[part], got[part]
            )
        flying = apart(
            "in_flight after wait()", np.array(0), outcome.values["in_flight after wait()"]
        )
        if text or flying:
            yield Fault("gather", text or flying, rank)
            break
    for rank, outcome in enumerate(outcomes):
        carried = sum(call["sent"] for call in outcome.calls["gather"])
        text = "" if carried == sent else f"bytes through MPI: expected {sent:,}, got {carried:,}"
        for name in ("declared_bytes", "bytes_sent in the ledger"):
            text = text or apart(name, np.array(sent), outcome.values[name])
        if text:
            yield Fault("bytes", text, rank)
            break
    yield from untouched("owners keep float32", outcomes)


def _losses(outcomes):
    for rank, outcome in enumerate(outcomes):
        own, plain = (outcome.values[f"losses at stage 1, {name}"] for name in ("own", "zmpi's"))
        text = apart("loss of each step at stage 1", plain, own)
        if text:
            yield Fault("exact where whole", text, rank)
            break
    for rank, outcome in enumerate(outcomes):
        own, plain = (outcome.values[f"losses at stage 3, {name}"] for name in ("own", "zmpi's"))
        text = apart("loss of each step at stage 3", plain, own, _CLOSE * float(plain.min()))
        if text:
            yield Fault("in zmpi", text, rank)
            break


TASK_8 = Task(
    8,
    "a communicator of your own",
    "t8_own_communicator.py",
    _IDEAS,
    _cases,
    _run,
    _judge,
    in_zmpi=True,
)
