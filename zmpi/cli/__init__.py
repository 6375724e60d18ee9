"""The command line: flags, how a run begins and resumes, what it prints and logs."""
