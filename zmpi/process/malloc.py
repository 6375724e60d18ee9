"""glibc's malloc, tuned before NumPy's first array: it keeps freed memory, and uses huge pages."""

import ctypes
import resource

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # malloc.h of glibc
MADV_HUGEPAGE, PAGE = 14, 2 << 20  # sys/mman.h; bytes
HEAP, TOP_PAD = 1 << 30, 128 << 10  # bytes; TOP_PAD is glibc's default
PART = 16  # the heap may reserve 1/PART of a limited address space


def keep_freed_memory() -> str:
    """Let malloc keep freed blocks, so that the next step does not fault their pages in again.

    Returns what was done: "thresholds", "no mmap" (an older glibc, which refuses thresholds above
    32 MiB) or "nothing" (no glibc).
    """
    libc = _glibc()
    if libc is None or libc.mallopt(M_TRIM_THRESHOLD, -1) != 1:
        return "nothing"
    if libc.mallopt(M_MMAP_THRESHOLD, 2**30) == 1:
        return "thresholds"
    return "no mmap" if libc.mallopt(M_MMAP_MAX, 0) == 1 else "nothing"


def use_huge_pages() -> bool:
    """Ask for 2 MiB pages in the first GiB of malloc's heap; returns whether the system agreed.

    NumPy asks for them only for arrays from 4 MiB. A small model's arrays are smaller, and with
    4 KiB pages its matrix products look up a page per row. The GiB is address space, not memory; if
    that is limited (`ulimit -v`), the heap takes a small part and leaves the rest to libraries,
    threads and messages.
    """
    libc, heap = _glibc(), min(HEAP, _address_space() // PART)
    if libc is None or heap < PAGE:
        return False
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    start = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, heap)  # the heap grows by this much more than requested
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(PAGE))))
    libc.mallopt(M_TOP_PAD, TOP_PAD)
    first, end = -(-start // PAGE) * PAGE, libc.sbrk(0) // PAGE * PAGE
    return (
        end > first
        and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE) == 0
    )


def _address_space():
    """Bytes that this process may map; more than any heap if unlimited."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=1 << 62)


def _glibc():
    """This process's C library if it is glibc, else None: other mallopts use other numbers."""
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
