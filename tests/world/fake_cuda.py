"""A GPU without a GPU: the CuPy that zmpi uses, on host memory, with streams as late as allowed.

Nothing that is launched happens before the host waits for it (or, on an `eager` stream, as soon as
its events allow): until then new memory holds NaN and old memory what was there before. So MPI,
which reads the memory by its address, finds out whoever forgot to wait. An array refuses to become
NumPy's, has no buffer, and computes with its own kind and with numbers only. Freed memory is handed
out again at once, as by CuPy's pool: in the order of the one stream that computes.

What it cannot show: kernels' own races, cuBLAS, CuPy's rules of promotion, IPC, speed.
"""

import ctypes
import weakref
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class Stream:
    """A queue of work. `late`: nothing runs before a wait; else as soon as its events allow."""

    def __init__(self, late=True):
        self.queue, self.late = deque(), late
        self.ptr = id(self)

    def push(self, work):
        self.queue.append(work)
        if not self.late:
            self.run()
        return work

    def run(self, until=None):
        """Run what is queued, up to and including `until` (None: all)."""
        while self.queue:
            work = self.queue.popleft()
            work()
            if work is until:
                return

    def synchronize(self):
        self.run()

    def record(self, event=None):
        event = event or Event()
        event.stream, event.mark, event.done = self, None, False

        def mark():
            event.done = True

        event.mark = mark
        self.push(mark)
        return event

    def wait_event(self, event):
        self.push(event.synchronize)


class Event:
    stream = mark = None
    done = True

    def synchronize(self):
        if not self.done:
            self.stream.run(until=self.mark)


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the fake GPU: `raw` is the host memory it pretends not to be in."""

    __array__ = None
    __array_priority__ = 100

    def __init__(self, cuda, raw, base=None):
        self.cuda, self.raw, self.base = cuda, raw, base

    # -- what it looks like ------------------------------------------------------------------------

    shape, dtype, ndim, size, nbytes, itemsize, strides, flags = (
        property(lambda self, name=name: getattr(self.raw, name))
        for name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags")
    )

    @property
    def data(self):
        return SimpleNamespace(ptr=self.raw.ctypes.data)

    @property
    def __cuda_array_interface__(self):
        entries = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": self.strides,
            "stream": 1,
        }
        return entries | {"data": (self.data.ptr, False), "version": 3}

    def __len__(self):
        return len(self.raw)

    def _scalar(self):
        self.cuda.stream.synchronize()
        return self.raw

    def __float__(self):
        return float(self._scalar())

    def __int__(self):
        return int(self._scalar())

    __index__ = __int__

    def tolist(self):
        return self._scalar().tolist()

    def __bool__(self):
        return bool(self._scalar())

    # -- views -------------------------------------------------------------------------------------

    def _view(self, raw):
        return Array(self.cuda, raw, base=self if self.base is None else self.base)

    def reshape(self, *shape):
        result = self.raw.reshape(*shape)
        return (
            self._view(result)
            if np.may_share_memory(result, self.raw)
            else self.copy().reshape(*shape)
        )

    def swapaxes(self, a, b):
        return self._view(self.raw.swapaxes(a, b))

    def view(self, dtype):
        return self._view(self.raw.view(dtype))

    @property
    def T(self):
        return self._view(self.raw.T)

    def __getitem__(self, key):
        if any(isinstance(part, Array) for part in (key if isinstance(key, tuple) else (key,))):
            return self.cuda.call(lambda raw, key: raw[key], (self, key), {})
        return self._view(self.raw[key])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    # -- work --------------------------------------------------------------------------------------

    def __setitem__(self, key, value):
        raw, key, value = self.raw, self.cuda.raw(key), self.cuda.raw(value)
        self.cuda.stream.push(lambda: raw.__setitem__(key, value))

    def fill(self, value):
        self[...] = value

    def copy(self):
        return self.cuda.call(np.copy, (self,), {})

    def astype(self, dtype, **_):
        return self.cuda.call(lambda raw: raw.astype(dtype), (self,), {})

    def sum(self, **options):
        return self.cuda.call(np.sum, (self,), options)

    def max(self, **options):
        return self.cuda.call(np.max, (self,), options)

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return self.cuda.call(getattr(ufunc, method), args, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        if function is np.copyto:
            args[0][...] = args[1]
            return None
        if function is np.flatnonzero:  # its shape depends on the numbers
            self.cuda.stream.synchronize()
            return self.cuda.put(np.flatnonzero(args[0].raw))
        return self.cuda.call(function, args, kwargs)


class Cuda:
    """The module `cupy`, as far as zmpi uses it. `late`: of (the computing, other streams)."""

    def __init__(self, late=(True, True), devices=1):
        self.stream, self.free = Stream(late[0]), defaultdict(list)
        self.used, self.hooks, self.pinned, self.chosen = 0, [], 0, None
        self.streams = {self.stream.ptr: self.stream}
        self.late, self.devices = late, devices
        self.cuda = SimpleNamespace(
            is_available=lambda: devices > 0,
            get_current_stream=lambda: self.stream,
            Stream=self._new_stream,
            Event=Event,
            Device=self._choose,
            MemoryHook=self._hook_class(),
            alloc_pinned_memory=self._pin,
            runtime=SimpleNamespace(
                getDeviceCount=lambda: devices,
                memcpy2DAsync=self._copy,
                memcpyHostToDevice=HOST_TO_DEVICE,
                memcpyDeviceToHost=DEVICE_TO_HOST,
            ),
        )

    # -- arrays ------------------------------------------------------------------------------------

    def empty(self, shape, dtype=np.float64):
        """New memory: freed memory of this size if there is some, as it is, else poisoned."""
        shape, dtype = (shape,) if np.ndim(shape) == 0 else tuple(shape), np.dtype(dtype)
        nbytes = -(-max(1, int(np.prod(shape)) * dtype.itemsize) // 512) * 512
        # NaN in every float
        block = self.free[nbytes].pop() if self.free[nbytes] else np.full(nbytes, 0xFF, np.uint8)
        self.used += nbytes
        for hook in self.hooks:
            hook.malloc_postprocess(mem_size=nbytes)
        raw = block[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
        array = Array(self, raw)
        weakref.finalize(array, self._freed, block).atexit = False
        return array

    def _freed(self, block):
        self.free[len(block)].append(block)
        self.used -= len(block)
        for hook in self.hooks:
            hook.free_postprocess(mem_size=len(block))

    def put(self, array):
        """cupy.asarray: what the host has now, once the stream is there."""
        here, kept = self.empty(array.shape, array.dtype), np.array(array)
        here[...] = kept[...] if kept.ndim == 0 else _Upload(kept)
        return here

    asarray = put

    def asnumpy(self, array):
        self.stream.synchronize()
        return array.raw.copy()

    def raw(self, value):
        """What the host's function takes for a value; an array of NumPy's is refused."""
        if isinstance(value, _Upload):
            return value.array
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("an array of NumPy's met one of the GPU")
        if isinstance(value, (tuple, list)):
            return type(value)(self.raw(part) for part in value)
        return value.raw if isinstance(value, Array) else value

    def call(self, function, args, kwargs):
        """Launch a function of NumPy's: its result is there once the stream is."""
        out = kwargs.get("out")
        args, kwargs = self.raw(args), {name: self.raw(value) for name, value in kwargs.items()}

        def quietly():
            with np.errstate(all="ignore"):
                return function(*args, **kwargs)

        if out is not None:
            self.stream.push(quietly)
            return out[0] if isinstance(out, tuple) else out
        with np.errstate(all="ignore"):
            like = function(
                *_zeros(args), **{name: _zeros(value) for name, value in kwargs.items()}
            )
        if not isinstance(like, (np.ndarray, np.generic)):
            self.stream.synchronize()
            return quietly()
        result = self.empty(like.shape, like.dtype)
        raw = result.raw
        self.stream.push(lambda: raw.__setitem__(..., quietly()))
        return result

    # -- the module cupy.cuda ----------------------------------------------------------------------

    def _new_stream(self, non_blocking=False):
        stream = Stream(self.late[1])
        self.streams[stream.ptr] = stream
        return stream

    def _choose(self, index):
        if not 0 <= index < self.devices:
            raise ValueError(f"no device {index}")
        return SimpleNamespace(use=lambda: setattr(self, "chosen", index))

    def _pin(self, nbytes):
        self.pinned += nbytes
        return (ctypes.c_ubyte * nbytes)(*[0xFF] * nbytes)

    def _copy(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert kind in (HOST_TO_DEVICE, DEVICE_TO_HOST)
        assert width <= target_pitch and width <= source_pitch

        def copy():
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

        self.streams[stream].push(copy)

    def _hook_class(self):
        class MemoryHook(nullcontext):
            def __enter__(hook):
                if hook.name in [other.name for other in self.hooks]:
                    raise KeyError(f"memory hook {hook.name} already exists")
                self.hooks.append(hook)
                return hook

        return MemoryHook

    def get_default_memory_pool(self):
        return SimpleNamespace(used_bytes=lambda: self.used)


class _Upload:
    """An array of NumPy's that is meant to be copied here."""

    def __init__(self, array):
        self.array = array


def _zeros(value):
    """Stand-ins that only have the right shapes: their numbers may not be there yet."""
    if isinstance(value, (tuple, list)):
        return type(value)(_zeros(part) for part in value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value
