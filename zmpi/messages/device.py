"""Where arrays live and what computes on them: NumPy on a CPU, CuPy on a GPU. Nothing else in zmpi asks which."""

from dataclasses import dataclass, replace
from types import ModuleType

import ml_dtypes  # noqa: F401  (CuPy knows bfloat16 if this is loaded before it)
import numpy as np

from zmpi.messages.memory import peak_resident_bytes, traced_array_bytes, watched_pool

ALIGNED = 64  # bytes; a GPU's matrix products are chosen by the alignment of what they multiply


@dataclass(frozen=True)
class Device:
    """A kind of memory and the array module that computes in it. This one is the CPU's."""

    name: str
    xp: ModuleType
    why: str = ""  # it was chosen, where nobody named it

    align = 1  # elements: where in its unit's vector a parameter may start

    def recipe(self, recipe):
        """The number types of a run here."""
        return recipe

    def put(self, array):
        """A NumPy array's values, here."""
        return array

    def get(self, array):
        """An array's values, as a NumPy array."""
        return array

    def batches(self, micro_batches):
        """[(inputs, targets), ...] one after the other, here."""
        return ((self.put(inputs), self.put(targets)) for inputs, targets in micro_batches)

    def read_into(self, target, read):
        """Let read(array) fill a NumPy array with what becomes the values of `target`, which lies here."""
        read(target)

    def address(self, vector):
        """Where a vector's memory starts."""
        return vector.ctypes.data

    def peak_bytes(self):
        """The highest bytes that this process has held here so far: on a CPU, of everything."""
        return peak_resident_bytes()

    def held_bytes(self):
        """Bytes of the arrays that are alive here: of NumPy's since tracemalloc was started."""
        return traced_array_bytes()


class Gpu(Device):
    """One GPU, by CuPy: the array module `xp`. Work is queued on its current stream; nothing here waits for it but `get`.

    Each parameter starts on a 64-byte boundary in every type (a vector itself lies on a 512-byte one in CuPy's pool), so
    that every stage multiplies with the same kernels, to the same bits. 16-bit weights are not widened: matrix products
    take them as they are and add up in float32, and so do the partial gradients of parameters.
    """

    align = ALIGNED // 2

    def __init__(self, xp, index, why=""):
        super().__init__("cuda", xp, why)
        xp.cuda.Device(index).use()
        object.__setattr__(self, "pool", watched_pool(xp))

    def recipe(self, recipe):
        return replace(recipe, compute=recipe.parameter)

    def put(self, array):
        return self.xp.asarray(array)

    def get(self, array):
        return self.xp.asnumpy(array)

    def read_into(self, target, read):
        host = np.empty(target.shape, target.dtype)
        read(host)
        target[...] = self.put(host)

    def address(self, vector):
        return vector.data.ptr

    def peak_bytes(self):
        """The highest bytes that were in use of CuPy's pool; context, cuBLAS and MPI's own memory are outside of it."""
        return self.pool.peak

    def held_bytes(self):
        return self.xp.get_default_memory_pool().used_bytes()


def choose_device(asked, local_rank=0):
    """The device for `auto`, `cpu` or `cuda`: the node's GPUs go round by `local_rank`.

    Raises ValueError where it is not to be had (never another than asked); `auto` takes a GPU if CuPy sees one.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda; got {asked!r}")
    if asked == "cpu":
        return Device("cpu", np)
    cupy, fault = find_cupy()
    if cupy is None and asked == "cuda":
        raise ValueError(f"--device: cuda is not to be had: {fault}")
    if cupy is None:
        return Device("cpu", np, why=fault)
    seen = cupy.cuda.runtime.getDeviceCount()
    return Gpu(cupy, local_rank % seen, why=f"CuPy sees {seen}" if asked == "auto" else "")


def find_cupy():
    """(CuPy, "") where it sees a GPU, else (None, why not)."""
    try:
        import cupy
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        return (
            None,
            "CuPy is not installed"
            if missing
            else f"CuPy cannot be imported: {str(error).splitlines()[0]}",
        )
    if not cupy.cuda.is_available():
        return None, "CuPy sees no GPU"
    return cupy, ""
