"""Losses and scores, fitted to what a model puts out."""
