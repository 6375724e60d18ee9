"""zmpi.verify's checks, one file per kind of evidence."""
