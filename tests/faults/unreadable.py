"""zmpi.train, with the data file unreadable on rank 1 alone (file modes would not stop root)."""

import sys

from mpi4py import MPI

import zmpi.text.data
from zmpi import train

if MPI.COMM_WORLD.rank == 1:

    def unreadable(path):
        raise PermissionError(13, "Permission denied", str(path))

    zmpi.text.data._opened = unreadable

train.main(sys.argv[1:])
