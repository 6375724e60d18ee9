"""Chooses between an operation and its fused twin on a GPU.

Operations are written once, with NumPy functions that dispatch on the array type, so they also run
on CuPy arrays. Those with a twin pass CuPy arrays to it: the function with the same name and
signature in the package's `kernels` module, imported on first use.
"""

from functools import wraps
from importlib import import_module


def on_gpu(operation):
    """Decorate an operation: if its first argument is a CuPy array, call its twin."""
    kernels = operation.__module__.rpartition(".")[0] + ".kernels"

    @wraps(operation)
    def either(array, *rest, **options):
        if type(array).__module__.partition(".")[0] == "cupy":
            return getattr(import_module(kernels), operation.__name__)(array, *rest, **options)
        return operation(array, *rest, **options)

    return either
