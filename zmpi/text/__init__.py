"""Text: data files, tokens, training windows, and generation."""
