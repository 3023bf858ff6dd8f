"""Federations: the clients' data, and where it comes from."""

from fairwind.data.federation import Federation

__all__ = ["Federation"]
