"""The simulator: clients and runs, stacked or one after another."""
