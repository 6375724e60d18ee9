"""zmpi.train with a fault on one rank (mpirun): `checkpoint_driver.py FAULT RANK NUMBER FLAGS...`

limit       files may grow to NUMBER bytes only
all         each argument after the third is the end of a command line; prints each one's error
strange     the file system cannot sync folders, has no locks, and refuses to remove folders
signal      before its third step the rank sends itself the signal NUMBER; `signals`: twice
"""

import errno
import fcntl
import os
import resource
import sys
import time

from zmpi import train
from zmpi.core.engine import ZeRO
from zmpi.messages.world import World
from zmpi.process.errors import UsageError

fault, victim, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if World(device="cpu").rank == victim:
    if fault == "limit":
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (number, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    elif fault == "strange":
        fsync = os.fsync

        def refusing(code, concerns=lambda path: True):
            def call(path, *arguments, **options):
                if not concerns(path):
                    return fsync(path)
                raise OSError(code, os.strerror(code))

            return call

        os.fsync = refusing(errno.EINVAL, lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"))
        fcntl.flock, os.rmdir = refusing(errno.ENOSYS), refusing(errno.ENOTEMPTY)
    elif number:
        step = ZeRO.train_step

        def struck(zero, micro_batches):
            if zero.step == 2:
                os.kill(os.getpid(), number)
                if fault == "signals":
                    os.kill(os.getpid(), number)
                time.sleep(
                    5 if fault == "signals" else 0.5
                )  # a signal is heard by the guard's thread
            return step(zero, micro_batches)

        ZeRO.train_step = struck

flags = sys.argv[4:]
if fault == "all":
    errors = []  # kept, with all that was alive where they were raised: none may hold the folder
    for end in flags[3:]:
        try:
            train.main([*flags[:3], *end.split()])
        except UsageError as error:
            errors.append(error)
            if World(device="cpu").rank == 0:
                print(error, flush=True)
else:
    sys.argv[1:] = flags
    train.main()
