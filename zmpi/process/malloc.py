"""malloc's habits, set before NumPy's first array: what was freed is kept, and lies on huge pages. glibc only."""

import ctypes
import resource

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # malloc.h of glibc
MADV_HUGEPAGE, PAGE = 14, 2 << 20  # sys/mman.h; bytes
HEAP, TOP_PAD = 1 << 30, 128 << 10  # bytes, the second as glibc has it
PART = 16  # of the address space that is limited, how little of it the heap may reserve


def keep_freed_memory() -> str:
    """Let malloc keep freed blocks for the next step, so that large temporaries do not fault their pages in again.

    Returns what was done: "thresholds", "no mmap" (older glibc refuses thresholds above 32 MiB), "nothing" (no glibc).
    """
    libc = _glibc()
    if libc is None or libc.mallopt(M_TRIM_THRESHOLD, -1) != 1:
        return "nothing"
    if libc.mallopt(M_MMAP_THRESHOLD, 2**30) == 1:
        return "thresholds"
    return "no mmap" if libc.mallopt(M_MMAP_MAX, 0) == 1 else "nothing"


def use_huge_pages() -> bool:
    """Ask for pages of 2 MiB in the first GiB of malloc's heap, before it grows there; returns whether it is so.

    NumPy asks for them from 4 MiB an array on. A small model's arrays are smaller, and its matrix products walk over many
    rows: with pages of 4 KiB the processor looks up one for each. The GiB is address space, not memory; where that is
    limited (`ulimit -v`) the heap gets a small part of it, and the rest stays for libraries, threads and messages.
    """
    libc, heap = _glibc(), min(HEAP, _address_space() // PART)
    if libc is None or heap < PAGE:
        return False
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    start = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, heap)  # the heap grows by so much more than is asked for
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(PAGE))))
    libc.mallopt(M_TOP_PAD, TOP_PAD)
    first, end = -(-start // PAGE) * PAGE, libc.sbrk(0) // PAGE * PAGE
    return (
        end > first
        and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE) == 0
    )


def _address_space():
    """Bytes that this process may map; more than any heap where nothing limits them."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=1 << 62)


def _glibc():
    """The C library of this process where it is glibc, else None: another one's mallopt has other numbers."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
