"""malloc's habits: what was freed is kept, and small arrays lie on huge pages."""

import os
from pathlib import Path

import pytest
from python import python

from zmpi.process import malloc


def test_freed_memory_is_kept_or_there_is_no_glibc():
    known = (
        "glibc" in os.confstr("CS_GNU_LIBC_VERSION")
        if "CS_GNU_LIBC_VERSION" in os.confstr_names
        else False
    )
    assert malloc.keep_freed_memory() in (("thresholds", "no mmap") if known else ("nothing",))


def test_a_page_that_was_freed_is_not_faulted_in_again():
    """Without it 1,000 faults per 8 MB pair; the bound leaves room for the interpreter's own."""
    script = """
import resource
import zmpi
import numpy as np
def faults():
    a = np.ones(1 << 20); b = a * a
    del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = [faults() for _ in range(3)][-1]
print(faults() - first)
"""
    if malloc.keep_freed_memory() == "nothing":
        pytest.skip("no glibc")
    assert int(python(script, os.environ)) < 100


def test_arrays_lie_where_huge_pages_are_asked_for():
    """1 MiB, for which NumPy asks nothing. Whether the kernel has such pages is not tested."""
    script = """
import zmpi
import numpy as np
address = np.ones(1 << 18, np.float32).ctypes.data
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        start, stop = (int(end, 16) for end in first.split("-"))
    elif first == "VmFlags:" and start <= address < stop:
        print("hg" in line.split())
"""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if malloc.keep_freed_memory() == "nothing" or not setting.exists():
        pytest.skip("no glibc, or a kernel without huge pages")
    assert python(script, os.environ) == "True\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["AS", "DATA"])
def test_where_address_space_is_limited_the_heap_takes_little_of_it(kind):
    """As under `ulimit -v`: a gigabyte reserved there is one that libraries and messages lack."""
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_{kind}, (1100 << 20, 1100 << 20))
import zmpi
heap = [line.split()[0] for line in open("/proc/self/maps") if line.endswith("[heap]\\n")]
parts = [[int(end, 16) for end in part.split("-")] for part in heap]
print(sum(stop - start for start, stop in parts))
"""
    if malloc.keep_freed_memory() == "nothing":
        pytest.skip("no glibc")
    reserved = (1100 << 20) // malloc.PART
    assert reserved <= int(python(script, os.environ)) < 2 * reserved  # the rest is in use


def test_importing_zmpi_changes_only_the_variables_that_it_says():
    """On a node of many ranks, and on an AMD Zen 4 too where this is one. What is set is kept."""
    script = """
import os
before = dict(os.environ)
import zmpi
from zmpi.process.prepare import prepare_process
said = prepare_process.__doc__
changed = {name for name in os.environ.keys() | before if os.environ.get(name) != before.get(name)}
assert all(name in said for name in changed) and "OMP_NUM_THREADS" in changed, changed
set_by_a_user = dict.fromkeys(changed, "3")
kept = dict(set_by_a_user)
prepare_process(kept)
assert {name: kept[name] for name in changed} == set_by_a_user, kept
print(len(changed))
"""
    kept = "PATH", "HOME", "LD_LIBRARY_PATH"  # this process has imported zmpi: little is inherited
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    assert int(python(script, environ | {"MPI_LOCALNRANKS": "500"})) >= 4
