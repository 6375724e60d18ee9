"""Everything that `import zmpi` changes in this process, in one call."""

from zmpi.process.blas import choose_kernels, set_threads
from zmpi.process.cores import wait_politely
from zmpi.process.malloc import keep_freed_memory, use_huge_pages


def prepare_process(environ):
    """Set up BLAS, MPI and malloc, before NumPy and MPI load: they read `environ` once.

    Variables that you set are kept. Child processes inherit them.

        BLAS threads  OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, OMP_NUM_THREADS: each rank's share of
                      its node's cores, so that ranks do not compete
        BLAS kernels  OPENBLAS_CORETYPE, only on AMD's Zen 4, where 256-bit kernels are faster
        MPI's waits   MPIR_CVAR_ENABLE_HEAVY_YIELD, on nodes with more ranks than cores: a waiting
                      rank yields its core
        malloc        keeps freed memory: a step reuses the previous one's pages (glibc)
        huge pages    2 MiB pages for malloc's first GiB: small arrays are read faster (Linux)
    """
    set_threads(environ)
    choose_kernels(environ)
    wait_politely(environ)
    keep_freed_memory()
    use_huge_pages()
