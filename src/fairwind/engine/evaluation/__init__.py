"""Scores and losses of models on clients."""
