"""What `import zmpi` changes in this process: all of it, in one call."""

from zmpi.process.blas import choose_kernels, set_threads
from zmpi.process.cores import wait_politely
from zmpi.process.malloc import keep_freed_memory, use_huge_pages


def prepare_process(environ):
    """Set up BLAS, MPI and malloc, before NumPy and MPI are loaded: they read `environ` once.

    A variable that the user has set stays as it is. A child process inherits the variables.

        BLAS threads    OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, OMP_NUM_THREADS: a rank's share of
                        its node's cores, so that the ranks do not take them from each other
        BLAS kernels    OPENBLAS_CORETYPE, on AMD's Zen 4 only: 256-bit kernels are faster there
        MPI's waits     MPIR_CVAR_ENABLE_HEAVY_YIELD, where a node has more ranks than cores: a rank
                        that waits gives up its core
        malloc          keeps what is freed: a step reuses the pages of the one before (glibc)
        huge pages      2 MiB pages for malloc's first GiB: small arrays are read faster (Linux)
    """
    set_threads(environ)
    choose_kernels(environ)
    wait_politely(environ)
    keep_freed_memory()
    use_huge_pages()
