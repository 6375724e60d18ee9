"""Checkpoints, and other tools' weights, on disk."""
