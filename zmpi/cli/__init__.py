"""The command line: flags, starting and resuming a run, output and logs."""
