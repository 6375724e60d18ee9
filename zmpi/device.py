"""Where arrays live: NumPy on a CPU, CuPy on a GPU. Nothing else in zmpi asks which."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np


@dataclass(frozen=True)
class Device:
    """A kind of memory and the array module that computes in it."""

    name: str
    xp: ModuleType


def choose_device(asked):
    """The device for `auto`, `cpu` or `cuda`; raises ValueError where it is not to be had (never another than asked)."""
    if asked in ("auto", "cpu"):
        return Device("cpu", np)
    if asked == "cuda":
        raise ValueError("--device: cuda is not supported yet; expected auto or cpu")
    raise ValueError(f"--device: expected auto, cpu or cuda; got {asked!r}")
