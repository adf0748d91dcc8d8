"""What people read: the console table of a run, results/README.md and its plots. Pure functions of records."""
