"""All rows at once: the stacked model, its steps, chunks and sums."""
