"""How a process starts, fails, ends and speaks: what stands below MPI and NumPy's arithmetic."""
