"""zmpi: ZeRO on MPI. Each rank keeps one shard of the training state; a layer is whole only in use.

Importing it sets up BLAS, MPI and malloc (see process/prepare.py), before NumPy is loaded. Names
are loaded on first use, so that zmpi.plan and zmpi.export run without MPI.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from zmpi.process.launch import end_before_mpi
from zmpi.process.prepare import prepare_process

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "zmpi.numbers.optim",
    "Communicator": "zmpi.messages.comm",
    "Optimizer": "zmpi.numbers.optim",
    "SGD": "zmpi.numbers.optim",
    "STAGES": "zmpi.core.stages",
    "Policy": "zmpi.numbers.precision",
    "World": "zmpi.messages.world",
    "ZeRO": "zmpi.core.engine",
}
__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'zmpi' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _check_models():
    """Raise an error if `models` is another package: a user's folder may come first on the path."""
    ours = Path(__file__).resolve().parent.parent / "models" / "__init__.py"
    spec = importlib.util.find_spec("models")
    found = spec.origin if spec else None
    if found is None or Path(found).resolve() != ours:
        line = f"package models: expected {ours}, found {found}; run from another folder"
        if sys.argv[:1] != ["-m"]:
            raise ImportError(line)
        end_before_mpi(f"{sys.orig_argv[sys.orig_argv.index('-m') + 1]}: error: {line}")


_check_models()
prepare_process(os.environ)
