"""What a stage costs: measured, counted in a dry run, planned, and plotted."""
