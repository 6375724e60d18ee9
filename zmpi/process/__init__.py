"""How a process starts, fails, ends and prints; below MPI and NumPy."""
