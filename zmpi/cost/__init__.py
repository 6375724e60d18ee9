"""What a stage costs: measured in a run, counted in a dry one, planned, and drawn."""
