"""What checkpoints, and weights of other tools, are made of on disk."""
