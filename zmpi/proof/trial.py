"""Small runs to compare with each other: models whose sizes do not divide, different data on every
rank.
"""

import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from models import GPT, MLP
from models.layer import one_target
from zmpi.core.engine import ZeRO
from zmpi.messages.world import World
from zmpi.numbers.optim import AdamW
from zmpi.numbers.precision import Policy
from zmpi.process.errors import Agreed, one_line

TRIAL_STEPS = 3
TRIAL_SEED = 7
SMALL_CHUNKS = 5000  # of every collective: the GPT's units need several, the MLP's need one
SMALL_MODELS = {
    "GPT": GPT(layers=3, width=15, heads=3, context=7, vocab=29),
    "MLP": MLP(layers=2, width=5, context=3, vocab=11),
}
SMALL = (  # sizes of a model of one's own: those of the GPT above, or even ones
    {"layers": 3, "width": 15, "heads": 3, "context": 7, "vocab": 29},
    {"layers": 3, "width": 24, "heads": 4, "context": 8, "vocab": 32},
)
LARGER = {"layers": 3, "width": 64, "heads": 4, "context": 16, "vocab": 401}
LARGE = GPT(**LARGER)  # units stand out in a memory trace


@dataclass(frozen=True)
class Trial:
    """What is run: an engine of class `engine` (ZeRO, or a changed one) on `world`, and how."""

    world: World
    engine: type = ZeRO
    precision: str = "float32"
    model: str = "GPT"  # a key of `models`
    stage: int = 3
    accumulate: int = 1
    prefetch: int = 0
    recompute: bool = False
    optimizer: object = AdamW(lr=3e-3, clip=0.5, warmup=2)
    models: dict = field(default_factory=lambda: dict(SMALL_MODELS))
    large: object = LARGE  # the model of the checks of memory
    tolerance: float = 0.0  # the relative error that P1's rows may have; 0.0: the same bits

    def but(self, **changes):
        """This trial with other settings."""
        return replace(self, **changes)

    def reduced(self, reduction):
        """This trial with another reduction."""
        return replace(self, world=self.world.twin(reduction=reduction))

    def alone(self):
        """This trial on one rank, which takes the whole batch. Every rank runs it, each in a world
        of its own.
        """
        return replace(
            self, world=self.world.twin(alone=True), accumulate=self.accumulate * self.world.size
        )

    @property
    def reductions(self):
        """The reductions that the precision has."""
        return ("ordered",) if self.precision in ("float16", "bfloat16") else ("mpi", "ordered")

    def make(self):
        """A fresh engine, whose collectives are cut into chunks of SMALL_CHUNKS."""
        policy = Policy(self.precision, self.prefetch, self.recompute)
        model = self.models[self.model]
        with self.named("making the engine"):
            return _tried(self)(
                model, self.world, self.stage, self.optimizer, seed=TRIAL_SEED, policy=policy
            )

    @contextmanager
    def named(self, moment):
        """An exception inside becomes Failed, which says in which run and when."""
        try:
            yield
        except Failed:
            raise
        except Exception as error:
            text = sentence(error)
            when = "" if text.startswith(moment) else f"{moment}: "
            raise Failed(f"{self}, {when}{text}") from error

    def data(self, step):
        """This rank's micro-batches of a step."""
        return [
            self._micro_batch(step, m * self.world.size + self.world.rank)
            for m in range(self.accumulate)
        ]

    def _micro_batch(self, step, j):
        """Global micro-batch j: tokens of its own, ragged targets, and in the second one none that
        counts.
        """
        model, draw = self.models[self.model], np.random.default_rng([step, j])
        each = not one_target(model)  # every position has a target, or every window one
        inputs = draw.integers(0, model.vocab, (2 if each else 5, model.context))
        targets = draw.integers(-3, model.vocab, inputs.shape if each else len(inputs))
        if j == 1:
            targets[...] = -1
        return inputs, targets

    def __str__(self):
        """Which run this is, as the rows name it."""
        words = [
            f"stage {self.stage}",
            f"reduction {self.world.reduction}",
            self.model,
            self.precision,
            f"{self.accumulate} micro-batches" if self.accumulate > 1 else "",
            "prefetch" if self.prefetch else "",
            "recompute" if self.recompute else "",
        ]
        return ", ".join(filter(None, words))


class Failed(Exception):
    """A run ended by an error; the message says which run, when, and where in the code."""


def _tried(trial):
    """A trial's engine class, with collectives in chunks of SMALL_CHUNKS (what is lost between two
    chunks shows), and with errors that name the trial.
    """

    class Tried(trial.engine):
        def make_communicator(self, *arguments):
            comm = super().make_communicator(*arguments)
            comm.chunk_bytes = SMALL_CHUNKS
            return comm

        def train_step(self, micro_batches):
            with trial.named(f"step {self.step + 1}"):
                return super().train_step(micro_batches)

        def evaluate(self, micro_batches):
            with trial.named("evaluation"):
                return super().evaluate(micro_batches)

    return Tried


def sentence(error):
    """An exception in one line: what it is, and the last line of code outside of libraries that it
    came through.
    """
    if isinstance(error, (Failed, Agreed)):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    message = one_line(error)
    if "NoneType" in message:
        message = "a value is missing (None)"
    place = f"{Path(own[-1].filename).name}, line {own[-1].lineno} ({own[-1].name})"
    return f"{type(error).__name__} in {place}: {message}"
