"""Layers' kernels for GPUs."""
