"""Which device and transport are chosen, and what is printed about it. Needs no GPU and no MPI."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mpirun import ROOT, assert_refused, run_world

sys.path.insert(0, str(ROOT / "tests" / "world"))
from fake_cuda import Cuda

from zmpi.core.layout import Layout
from zmpi.messages.cuda_aware import choose_transport, cuda_awareness
from zmpi.messages.device import Gpu, choose_device, find_cupy

# ---- the device ----------------------------------------------------------------------------------


def test_cuda_without_cupy_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # import raises
    with pytest.raises(ValueError, match=r"--device: cuda is unavailable \(CuPy"):
        choose_device("cuda")
    device = choose_device("auto")
    assert device.name == "cpu" and "CuPy" in device.why and device.xp is np


def test_cuda_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Cuda(devices=0))
    with pytest.raises(ValueError, match=r"--device: cuda is unavailable \(CuPy sees no GPU"):
        choose_device("cuda")
    assert choose_device("auto").why == "CuPy sees no GPU"


def test_the_nodes_gpus_go_round_by_local_rank(monkeypatch):
    for rank, index in ((0, 0), (1, 1), (2, 2), (3, 0), (7, 1)):
        cuda = Cuda(devices=3)
        monkeypatch.setitem(sys.modules, "cupy", cuda)
        device = choose_device("auto", rank)
        assert device.name == "cuda" and cuda.chosen == index and device.why == "CuPy sees 3"
    assert choose_device("cuda", 1).why == ""


def test_cpu_does_not_look_for_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Cuda(devices=3))
    assert choose_device("cpu").name == "cpu"


def test_an_unknown_device_is_an_error():
    with pytest.raises(ValueError, match="--device: expected auto, cpu or cuda; got 'tpu'"):
        choose_device("tpu")


def test_the_pools_peak_is_the_highest_that_was_in_use():
    cuda = Cuda()
    before = cuda.empty(100, np.float32)
    device = Gpu(cuda, 0)
    assert Gpu(cuda, 0).pool is device.pool  # a second World of the process
    assert device.peak_bytes() == 512 == device.pool.used
    vectors = [cuda.empty(1000, np.float32) for _ in range(3)]
    del vectors[1:]
    assert device.peak_bytes() == 512 + 3 * 4096
    device.pool.restart()
    del vectors
    assert device.peak_bytes() == 512 + 4096 and before is not None


# ---- the layout on a GPU -------------------------------------------------------------------------

SHAPES = {"a": (5,), "b": (3, 7), "c": (64,), "d": (1,)}


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 6, 24, 64])
def test_every_parameter_starts_on_64_bytes_and_the_holes_are_padding(shards):
    layout = Layout("unit", "", SHAPES, shards, Gpu.align)
    assert [layout.offsets[name] * 2 % 64 for name in SHAPES] == [
        0
    ] * 4  # of 16-bit elements; others are wider
    parts = [layout.shard(owner) for owner in range(shards)]
    assert sum(map(layout.padding, parts)) == layout.padded - layout.elements
    assert (
        sum(stop - start for part in parts for _, start, stop in layout.spans(part))
        == layout.elements
    )
    vector = np.zeros(layout.padded)
    for view in layout.views(vector).values():
        view += 1
    assert [int(part.sum()) for part in np.split(vector, shards)] == [
        layout.shard_length - layout.padding(p) for p in parts
    ]
    if 192 % shards == 0:
        assert (
            layout.padded == Layout("unit", "", SHAPES, 1, Gpu.align).padded
        )  # the norm has the same pieces


# ---- the transport -------------------------------------------------------------------------------

CPU = ("cpu", False, "")
AWARE, PLAIN = (
    ("cuda", True, "MPIX_Query_cuda_support() is 1"),
    ("cuda", False, "MPIX_Query_cuda_support() is 0"),
)


def test_memory_of_the_host_needs_no_transport():
    assert choose_transport("auto", [CPU, CPU])[0] == "host"
    for asked in ("direct", "staged"):
        with pytest.raises(
            ValueError,
            match=f"--transport: {asked} carries GPU memory, but the arrays are on the CPU",
        ):
            choose_transport(asked, [CPU])


def test_direct_is_taken_if_every_ranks_mpi_says_so():
    assert choose_transport("auto", [AWARE, AWARE]) == ("direct", "MPIX_Query_cuda_support() is 1")
    name, why = choose_transport("auto", [AWARE, PLAIN, AWARE])
    assert name == "staged" and why.endswith("MPIX_Query_cuda_support() is 0 (rank 1)")


def test_what_is_asked_for_is_taken():
    assert choose_transport("direct", [PLAIN, PLAIN]) == ("direct", "as requested")
    assert choose_transport("staged", [AWARE, AWARE]) == ("staged", "as requested")


def test_ranks_of_different_devices_are_an_error():
    with pytest.raises(ValueError, match="auto found no GPU on rank 1"):
        choose_transport("auto", [AWARE, CPU])


def test_an_unknown_transport_is_an_error():
    with pytest.raises(
        ValueError, match="--transport: expected auto, direct or staged; got 'nccl'"
    ):
        choose_transport("nccl", [AWARE])


def gpu_query(status, answer):
    def query(kind, found):
        assert kind == 0
        found._obj.value = answer
        return status

    return query


@pytest.mark.parametrize(
    ("library", "kinds", "environ", "aware", "said"),
    [
        ({}, "mpi,system", {}, False, "no query"),
        ({}, "mpi,system,cuda", {}, True, "mpi_memory_alloc_kinds"),
        ({"MPIX_Query_cuda_support": lambda: 1}, "", {}, True, "MPIX_Query_cuda_support() is 1"),
        ({"MPIX_Query_cuda_support": lambda: 0}, "", {}, False, "MPIX_Query_cuda_support() is 0"),
        (
            {"MPIX_GPU_query_support": gpu_query(0, 1)},
            "",
            {},
            True,
            "MPIX_GPU_query_support() is 1",
        ),
        (
            {"MPIX_GPU_query_support": gpu_query(0, 0)},
            "",
            {},
            False,
            "MPIX_GPU_query_support() is 0",
        ),
        (
            {"MPIX_GPU_query_support": gpu_query(1, 1)},
            "",
            {},
            False,
            "MPIX_GPU_query_support() is 0",
        ),
        (
            {"MPIX_GPU_query_support": gpu_query(0, 0)},
            "",
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            False,
            "libmpi_gtl_cuda",
        ),
    ],
)
def test_the_librarys_own_word_is_taken(library, kinds, environ, aware, said):
    found, why = cuda_awareness(SimpleNamespace(**library), kinds, environ)
    assert found == aware and said in why


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.skipif(find_cupy()[0] is not None, reason="there is a GPU")
def test_what_cannot_be_done_is_one_line(tmp_path):
    flags = [("--device", "cuda"), ("--device", "cpu", "--transport", "direct")]
    assert_refused(2, tmp_path, {("--steps", "1", *words): [words[-2]] for words in flags})


def test_auto_says_what_it_took():
    world = run_world(
        2, ["-m", "zmpi.train", "--steps", "1", "--layers", "1", "--width", "16"], timeout=60
    )
    assert world.status == 0
    assert (
        "device cpu (auto: CuPy" in world.output or "device cuda (auto: CuPy sees" in world.output
    )
