"""The one place that chooses between an operation and its fused twin on a GPU.

Operations are written once, in NumPy's functions, which dispatch on the type of array: so they run on CuPy's arrays too.
Where there is a twin, CuPy's arrays are handed to it instead: the function of the same name and signature in the package's
`kernels` module, which is imported when the first such array comes.
"""

from functools import wraps
from importlib import import_module


def on_gpu(operation):
    """The operation; where its first argument is an array of CuPy's, its twin."""
    kernels = operation.__module__.rpartition(".")[0] + ".kernels"

    @wraps(operation)
    def either(array, *rest, **options):
        if type(array).__module__.partition(".")[0] == "cupy":
            return getattr(import_module(kernels), operation.__name__)(array, *rest, **options)
        return operation(array, *rest, **options)

    return either
