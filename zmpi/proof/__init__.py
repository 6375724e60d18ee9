"""What zmpi.verify checks, a file for each kind of evidence."""
