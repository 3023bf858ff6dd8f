"""One client after another."""
