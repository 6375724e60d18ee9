"""The ten questions of accounting: asked in the student's file, answered here by zmpi's own
formulas.
"""

from types import SimpleNamespace

from zmpi.core.formulas import elements_moved, state_bytes
from zmpi.core.stages import STAGES
from zmpi.cost.paper import largest_model
from zmpi.cost.speed import Speed
from zmpi.course.case import Case, Fault, Idea, Task
from zmpi.messages.ledger import Moved
from zmpi.numbers.precision import RECIPES

_CLOSE = 5e-3  # relative: what the questions allow
_PAPERS, _OURS = RECIPES["float16"], RECIPES["float32"]
_ABOUT = (
    *("what stage 1 shards", "what stage 2 shards", "what stage 3 shards"),
    "two number types, and the optimizer's copy",
    *("the formula turned over", "the formula turned over, nothing sharded"),
    *("every micro-batch gathers and reduces again", "every micro-batch reduces again"),
    *(
        "of what is gathered, the own shard need not travel",
        "computing grows with tokens, messages do not",
    ),
)
_IDEAS = tuple(Idea(f"question {i}", 2, about) for i, about in enumerate(_ABOUT, 1))


def answers():
    """{question: its answer}."""
    walk = SimpleNamespace(gathers={"model": 2}, reduces={"model": 1})

    def state(stage, parameters, ranks, recipe):
        return sum(state_bytes(STAGES[stage], parameters, ranks, recipe).values())

    def moved(stage, micro_batches):
        sizes = {"model": 10**9}
        return sum(elements_moved(STAGES[stage], walk, sizes, micro_batches, False).values())

    sent = moved(3, 1) * _OURS.parameter.itemsize * 15 / 16
    speed = Speed(flops=1e14, bandwidth=1e10)
    counts = {"flops": 6e9, "updated": 0, "moved": 0, "visits": 0}  # of one token
    messages = [("all_gather", Moved(bytes_sent=sent))]
    token = SimpleNamespace(counts=counts, messages=messages)
    return {
        1: state(1, 10**9, 8, _OURS),
        2: state(2, 10**9, 8, _OURS),
        3: state(3, 10**9, 8, _OURS),
        4: state(2, 7.5e9, 64, _PAPERS) / 1e9,
        5: largest_model(STAGES[3], 64, 32e9, _PAPERS),
        6: largest_model(STAGES[0], 64, 32e9, _PAPERS),
        7: moved(3, 4),
        8: moved(2, 4),
        9: sent,
        10: speed.comm_s(token) / speed.compute_s(token),
    }


def _cases(draw):
    """The questions are the same for every seed."""
    return [Case(1, "answers", {})]


def _run(student, comm, given, watch):
    """Read the answers."""
    for i in range(1, len(_IDEAS) + 1):
        watch.keep(f"answer {i}", student.ANSWERS.get(i))


def _judge(case, outcomes):
    """Each answer beside zmpi's; of a wrong one it says on which side it is, not what is right."""
    for i, right in answers().items():
        got = outcomes[0].values[f"answer {i}"]
        idea = f"question {i}"
        if got.dtype.kind == "U" or got.ndim:
            what = "none yet" if str(got) == "NoneType" else f"{got}"
            yield Fault(idea, f"expected a number, got {what}")
        elif not abs(float(got) - right) <= _CLOSE * right:
            side = "small" if float(got) < right else "large"
            text = f"expected a number within 0.5 %, got {float(got):.6g}, which is too {side}"
            yield Fault(idea, text)


QUESTIONS = Task(
    "questions", "ten questions of accounting", "questions.py", _IDEAS, _cases, _run, _judge
)
