"""Whether the MPI library takes GPU pointers, and so which transport to use."""

import ctypes


def cuda_awareness(library, kinds, environ):
    """(whether the MPI library says it takes GPU pointers, the evidence).

    `library` is opened by ctypes; `kinds` is its info key mpi_memory_alloc_kinds (MPI 4.1). The
    answer is a hint, not proof: some deny it but can (Open MPI without CUDA over a UCX with it),
    and older ones only say how they were built.
    """
    if "cuda" in kinds:
        return True, f"mpi_memory_alloc_kinds is {kinds}"
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None and query():
        return True, "MPIX_Query_cuda_support() is 1"
    general, answer = getattr(library, "MPIX_GPU_query_support", None), ctypes.c_int(0)
    if general is not None and general(0, ctypes.byref(answer)) == 0 and answer.value:
        return True, "MPIX_GPU_query_support() is 1 for CUDA"
    if general is not None and environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        why = "MPICH_GPU_SUPPORT_ENABLED is 1, but the library says no: is libmpi_gtl_cuda linked?"
        return False, why
    if query is None and general is None:
        return False, "the MPI library has no query for it"
    return False, f"{'MPIX_Query_cuda_support' if query else 'MPIX_GPU_query_support'}() is 0"


def choose_transport(asked, answers):
    """(name, why) for `auto`, `direct` or `staged`; `answers`: (device, aware, why) per rank.

    Raises ValueError if ranks have different devices, or the request cannot be met. Staging chosen
    by `auto` is always reported.
    """
    if asked not in ("auto", "direct", "staged"):
        raise ValueError(f"--transport: expected auto, direct or staged; got {asked!r}")
    devices = [device for device, _, _ in answers]
    if len(set(devices)) > 1:
        where = [rank for rank, device in enumerate(devices) if device != "cuda"]
        raise ValueError(
            f"--device: auto found no GPU on rank {where[0]}, but on others; choose cpu or cuda"
        )
    if devices[0] == "cpu":
        if asked != "auto":
            raise ValueError(
                f"--transport: {asked} carries GPU memory, but the arrays are on the CPU;"
                " leave it out, or use --device cuda"
            )
        return "host", "arrays are in host memory"
    if asked != "auto":
        return asked, "as requested"
    for rank, (_, aware, why) in enumerate(answers):
        if not aware:
            return "staged", f"through host memory: {why}" + (f" (rank {rank})" if rank else "")
    return "direct", answers[0][2]
