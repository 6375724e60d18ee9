"""The world of ranks: its collectives, how memory reaches MPI, and the ledger that books them."""
