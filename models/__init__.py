"""Hand-written forward and backward passes of two language models, independent of zmpi and MPI.

Read `layer.py` first: what a layer is, and the training step without ZeRO.
"""

from models.layer import Layer, UnitSpec, key_for, plain_step, plain_weights, unit_of, units
from models.mlp import MLP
from models.transformer import GPT

__all__ = [
    "GPT",
    "MLP",
    "Layer",
    "UnitSpec",
    "key_for",
    "plain_step",
    "plain_weights",
    "unit_of",
    "units",
]
