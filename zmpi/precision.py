"""Recipes: which number type each kind of state has, and so how many bytes it takes; and how a run is carried out."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Recipe:
    """The types of one training run. It declares its bytes: the ledger, the formulas and the log take them from here."""

    name: str
    parameter: np.dtype  # stored, and what a gather moves
    gradient: np.dtype  # stored, and what a reduce moves
    master: np.dtype  # what the optimizer updates, and the type of its moments and of every sum of gradients
    compute: np.dtype  # arithmetic, activations and partial gradients

    @property
    def own_master(self):
        """Whether the stored parameter is its own master (no separate copy is kept)."""
        return self.parameter == self.master

    def optimizer_bytes(self, moments):
        """K, the optimizer's bytes per parameter: the moments, and the master where it is a copy (paper, section 3.1)."""
        return self.master.itemsize * (moments if self.own_master else moments + 1)

    def bytes_per_parameter(self, moments=2):
        """{"name", "parameters", "gradients", "optimizer"}: the recipe as the log and the planner write it, in bytes."""
        return {
            "name": self.name,
            "parameters": self.parameter.itemsize,
            "gradients": self.gradient.itemsize,
            "optimizer": self.optimizer_bytes(moments),
        }

    def describe(self, moments=2):
        """The recipe as the paper writes it, such as '2 + 2 + 12 bytes per parameter'."""
        return (
            f"{self.parameter.itemsize} + {self.gradient.itemsize} + {self.optimizer_bytes(moments)} bytes per parameter"
            f" ({self.name})"
        )


def _recipe(name, stored, wide):
    stored, wide = np.dtype(stored), np.dtype(wide)
    return Recipe(name, parameter=stored, gradient=stored, master=wide, compute=wide)


RECIPES = {
    "float32": _recipe("float32", np.float32, np.float32),
    "bfloat16": _recipe("bfloat16", ml_dtypes.bfloat16, np.float32),
    "float16": _recipe("float16", np.float16, np.float32),
    "float64": _recipe("float64", np.float64, np.float64),  # for tests
}


@dataclass(frozen=True)
class Policy:
    """How a step is carried out. `prefetch` and `recompute` change no bit of it."""

    precision: str = "float32"
    prefetch: int = 1  # gathers that may be under way before they are needed: 0 or 1
    recompute: bool = False  # keep a layer's input only, and run its forward again in the backward pass

    def __post_init__(self):
        if self.precision not in RECIPES:
            raise ValueError(f"precision: expected one of {', '.join(RECIPES)}; got {self.precision!r}")
        if self.prefetch not in (0, 1):
            raise ValueError(f"prefetch: expected 0 or 1; got {self.prefetch!r}")

    @property
    def recipe(self):
        return RECIPES[self.precision]
