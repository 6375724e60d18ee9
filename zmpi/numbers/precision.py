"""Recipes: the number type, hence the bytes, of each kind of state. Policies: how a step runs."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from zmpi.numbers.domains import SIZE_BOUND, Domain, switch

PREFETCH = Domain(0, highest=1, whole=True, words="0 or 1")
LOSS_SCALE = Domain(1, highest=1 << 24, words="auto, or a number from 1 to 2^24")
WINDOW = Domain(1, below=SIZE_BOUND, whole=True)


@dataclass(frozen=True)
class Recipe:
    """A training run's types; the ledger, the formulas and the log take their bytes from it."""

    name: str
    parameter: np.dtype  # stored, and moved by a gather
    gradient: np.dtype  # stored, and moved by a reduce
    master: np.dtype  # updated by the optimizer; also its moments, and every sum of gradients
    compute: np.dtype  # activations, and the weights they are multiplied by
    partial: np.dtype  # partial gradients of parameters

    @property
    def own_master(self):
        """Whether the stored parameter is its own master (no separate copy)."""
        return self.parameter == self.master

    def optimizer_bytes(self, moments):
        """K, the optimizer's bytes per parameter: moments and master copy (paper, section 3.1)."""
        return self.master.itemsize * (moments if self.own_master else moments + 1)

    def bytes_per_parameter(self, moments=2):
        """{"name", "parameters", "gradients", "optimizer"}, in bytes, for log and planner."""
        return {
            "name": self.name,
            "parameters": self.parameter.itemsize,
            "gradients": self.gradient.itemsize,
            "optimizer": self.optimizer_bytes(moments),
        }

    def describe(self, moments=2):
        """The recipe in the paper's notation, such as '2 + 2 + 12 bytes per parameter'."""
        parts = self.parameter.itemsize, self.gradient.itemsize, self.optimizer_bytes(moments)
        return f"{' + '.join(map(str, parts))} bytes per parameter ({self.name})"


def _recipe(name, stored, wide):
    stored, wide = np.dtype(stored), np.dtype(wide)
    return Recipe(name, parameter=stored, gradient=stored, master=wide, compute=wide, partial=wide)


RECIPES = {
    "float32": _recipe("float32", np.float32, np.float32),
    "bfloat16": _recipe("bfloat16", ml_dtypes.bfloat16, np.float32),
    "float16": _recipe("float16", np.float16, np.float32),
    "float64": _recipe("float64", np.float64, np.float64),  # for tests
}


@dataclass(frozen=True)
class Policy:
    """How a step runs. `prefetch` and `recompute` change no bit of the result."""

    precision: str = "float32"
    prefetch: int = 1  # gathers started before they are needed: 0 or 1
    recompute: bool = False  # save only a layer's input, and repeat its forward in the backward
    loss_scale: float | str = "auto"  # a fixed number; auto: dynamic for float16, 1 for the others
    loss_scale_window: int = 2000  # good steps after which a dynamic scale doubles

    def __post_init__(self):
        if not isinstance(self.precision, str) or self.precision not in RECIPES:
            raise ValueError(
                f"precision: expected one of {', '.join(RECIPES)}; got {self.precision!r}"
            )
        prefetch, window = PREFETCH.of("prefetch", self.prefetch), self.loss_scale_window
        object.__setattr__(self, "prefetch", prefetch)
        object.__setattr__(self, "recompute", switch("recompute", self.recompute))
        object.__setattr__(self, "loss_scale", self._scale())
        object.__setattr__(self, "loss_scale_window", WINDOW.of("loss_scale_window", window))

    def _scale(self):
        """The fixed loss scale, or "auto"."""
        if isinstance(self.loss_scale, str) and self.loss_scale == "auto":
            return "auto"
        if self.precision != "float16":
            raise ValueError(
                f"loss_scale: applies to precision float16 only, not to {self.precision}"
            )
        return LOSS_SCALE.of("loss_scale", self.loss_scale)

    @property
    def recipe(self):
        return RECIPES[self.precision]

    def scaler(self):
        """A fresh LossScaler for this policy."""
        if self.loss_scale != "auto":
            return LossScaler(self.loss_scale, window=None)
        if self.precision == "float16":
            return LossScaler(LossScaler.START, self.loss_scale_window)
        return LossScaler(1.0, window=None)


@dataclass
class LossScaler:
    """The factor on the loss that keeps small gradients from underflowing in 16 bits.

    See arXiv 1710.03740, section 3.2. Part of the training state: `scale` and `good_steps` are
    saved and resumed. A fixed scale has no `window`.
    """

    scale: float
    window: int | None  # good steps after which the scale doubles
    good_steps: int = 0  # since the scale last changed

    START = 2.0**16
    HIGHEST = float(LOSS_SCALE.highest)

    def after_step(self, overflow):
        """Halve after an overflow (not below 1), double after `window` good steps (to HIGHEST)."""
        if self.window is None:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps >= self.window:  # more after resuming with a shorter window
            self.scale, self.good_steps = min(self.HIGHEST, self.scale * 2), 0
