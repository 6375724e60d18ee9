"""Where arrays live and compute: NumPy on a CPU, CuPy on a GPU. Nothing else in zmpi asks which."""

from dataclasses import dataclass, replace
from types import ModuleType

import ml_dtypes  # noqa: F401  (loaded before CuPy, it gives CuPy bfloat16)
import numpy as np

from zmpi.messages.memory import peak_resident_bytes, traced_array_bytes, watched_pool

ALIGNED = 64  # bytes; alignment decides which kernel a GPU uses for a matrix product


@dataclass(frozen=True)
class Device:
    """A kind of memory and its array module. This one is the CPU."""

    name: str
    xp: ModuleType
    why: str = ""  # the reason for the choice, if it was automatic

    align = 1  # elements: parameters start at multiples of this in their unit's vector

    def recipe(self, recipe):
        """The recipe's number types on this device."""
        return recipe

    def put(self, array):
        """A NumPy array, on this device."""
        return array

    def get(self, array):
        """This device's array, as a NumPy array."""
        return array

    def batches(self, micro_batches):
        """Yield each (inputs, targets), on this device."""
        return ((self.put(inputs), self.put(targets)) for inputs, targets in micro_batches)

    def read_into(self, target, read):
        """Fill `target`, on this device, through read(array), which fills a NumPy array."""
        read(target)

    def address(self, vector):
        """The address of a vector's memory."""
        return vector.ctypes.data

    def peak_bytes(self):
        """This process's peak bytes on this device so far: on a CPU, its resident memory."""
        return peak_resident_bytes()

    def held_bytes(self):
        """Bytes of live arrays here; for NumPy, of those made since tracemalloc was started."""
        return traced_array_bytes()


class Gpu(Device):
    """One GPU through CuPy (`xp`). Work is queued on the current stream; only `get` waits for it.

    Every parameter starts on a 64-byte boundary in any type (CuPy's pool aligns vectors to 512
    bytes), so that all stages multiply with the same kernels, to the same bits. 16-bit weights are
    not widened: matrix products read them directly and sum in float32, as do partial gradients.
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
        """Peak bytes in use of CuPy's pool, without the context, cuBLAS and MPI's own memory."""
        return self.pool.peak

    def held_bytes(self):
        return self.xp.get_default_memory_pool().used_bytes()


def choose_device(asked, local_rank=0):
    """The device for `auto`, `cpu` or `cuda`; GPUs are assigned round-robin by `local_rank`.

    Raises ValueError if the requested one is unavailable; `auto` takes a GPU if CuPy sees one.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda; got {asked!r}")
    if asked == "cpu":
        return Device("cpu", np)
    cupy, fault = find_cupy()
    if cupy is None and asked == "cuda":
        raise ValueError(f"--device: cuda is unavailable ({fault})")
    if cupy is None:
        return Device("cpu", np, why=fault)
    seen = cupy.cuda.runtime.getDeviceCount()
    return Gpu(cupy, local_rank % seen, why=f"CuPy sees {seen}" if asked == "auto" else "")


def find_cupy():
    """(CuPy, "") if it sees a GPU, else (None, why not)."""
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return None, "CuPy is not installed"
        return None, f"CuPy cannot be imported: {str(error).splitlines()[0]}"
    if not cupy.cuda.is_available():
        return None, "CuPy sees no GPU"
    return cupy, ""
