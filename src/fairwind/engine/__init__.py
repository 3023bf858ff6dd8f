"""The simulator: cohorts of clients and runs, stacked."""
