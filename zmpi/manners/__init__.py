"""How a process starts, fails and speaks: the launcher's variables, flags, errors, what is printed, and that nobody hangs."""
