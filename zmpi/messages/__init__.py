"""The world of ranks: its collectives, the ways memory takes to MPI, and the ledger that books them."""
