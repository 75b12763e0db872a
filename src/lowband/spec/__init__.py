"""WHAT is run: machines, schemes, models, runs and the records a job writes. Never imports torch."""
