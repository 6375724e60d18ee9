"""What is trained on, and what comes out: files, tokens, windows, and one token after the other."""
