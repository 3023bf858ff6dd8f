"""How a run is computed, and why."""
