"""Run a few lines in another Python: what importing zmpi does to a process, it does once."""

import os
import subprocess
import sys


def python(script, environ):
    """What another Python prints that runs the script."""
    environ = {**environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    ).stdout
