"""Small runs to compare: models whose sizes do not divide, and different data on every rank."""

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
SMALL_CHUNKS = 5000  # bytes: the GPT's units need several chunks, the MLP's one
SMALL_MODELS = {
    "GPT": GPT(layers=3, width=15, heads=3, context=7, vocab=29),
    "MLP": MLP(layers=2, width=5, context=3, vocab=11),
}
SMALL = (  # sizes to try for your own model: those of the GPT above, or even ones
    {"layers": 3, "width": 15, "heads": 3, "context": 7, "vocab": 29},
    {"layers": 3, "width": 24, "heads": 4, "context": 8, "vocab": 32},
)
LARGER = {"layers": 3, "width": 64, "heads": 4, "context": 16, "vocab": 401}
LARGE = GPT(**LARGER)  # units stand out in a memory trace


@dataclass(frozen=True)
class Trial:
    """A run's settings: an engine of class `engine` (ZeRO, or a changed one) on `world`, ..."""

    world: World
    engine: type = ZeRO
    precision: str = "float32"
    model: str = "GPT"  # a key of `models`
    stage: object = 3  # or (inside, outside), on a world of groups
    accumulate: int = 1
    prefetch: int = 0
    recompute: bool = False
    optimizer: object = AdamW(lr=3e-3, clip=0.5, warmup=2)
    models: dict = field(default_factory=lambda: dict(SMALL_MODELS))
    large: object = LARGE  # the model for the memory checks
    tolerance: float = 0.0  # the relative error allowed in P1's rows; 0.0: the same bits

    def but(self, **changes):
        """This trial with other settings."""
        return replace(self, **changes)

    def reduced(self, reduction):
        """This trial with another reduction."""
        return replace(self, world=self.world.twin(reduction=reduction))

    def alone(self):
        """This trial on one rank with the whole batch; every rank runs it, in its own world."""
        return replace(
            self, world=self.world.twin(alone=True), accumulate=self.accumulate * self.world.size
        )

    @property
    def stages(self):
        """All that can be asked of this world: each stage, or each pair (inside, outside)."""
        if len(self.world.axes) == 1:
            return (0, 1, 2, 3)
        return tuple((inside, outside) for inside in range(4) for outside in range(inside + 1))

    @property
    def all_stages(self):
        """These, in words."""
        return "stages 0-3" if len(self.stages) == 4 else "all ten placements"

    @property
    def group(self):
        """The ranks of a group; 1 on a flat world."""
        return self.world.group or 1

    @property
    def word(self):
        """The stage, as the rows name it."""
        stage = self.stage
        return ",".join(map(str, stage)) if isinstance(stage, tuple) else str(stage)

    @property
    def reductions(self):
        """The reductions possible in this precision."""
        return ("ordered",) if self.precision in ("float16", "bfloat16") else ("mpi", "ordered")

    def make(self):
        """A new engine, with collectives in chunks of SMALL_CHUNKS bytes."""
        policy = Policy(self.precision, self.prefetch, self.recompute)
        model = self.models[self.model]
        with self.named("making the engine"):
            return _tried(self)(
                model, self.world, self.stage, self.optimizer, seed=TRIAL_SEED, policy=policy
            )

    @contextmanager
    def named(self, moment):
        """Turn an exception inside into Failed, which says in which run and when."""
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
        """Global micro-batch j: its own tokens, ragged targets, and none counted in the second."""
        model, draw = self.models[self.model], np.random.default_rng([step, j])
        each = not one_target(model)  # every position has a target, or every window one
        inputs = draw.integers(0, model.vocab, (2 if each else 5, model.context))
        targets = draw.integers(-3, model.vocab, inputs.shape if each else len(inputs))
        if j == 1:
            targets[...] = -1
        return inputs, targets

    def __str__(self):
        """This run's name in the rows."""
        words = [
            f"stage {self.word}",
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
    """A trial's engine class, with small chunks (errors at their borders show) and named errors."""

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
    """An exception in one line, with the last line of code outside libraries that it passed."""
    if isinstance(error, (Failed, Agreed)):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    message = one_line(error)
    if "NoneType" in message:
        message = "a value is missing (None)"
    place = f"{Path(own[-1].filename).name}, line {own[-1].lineno} ({own[-1].name})"
    return f"{type(error).__name__} in {place}: {message}"
