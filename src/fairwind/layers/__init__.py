"""PyTorch's layers in forms that `torch.func.vmap` can stack over models."""

from fairwind.layers.conversion import stackable
from fairwind.layers.counting import counted
from fairwind.layers.dropout import key_names
from fairwind.layers.randomness import CountedRandomness
from fairwind.layers.tracing import OperationCounter, tracing

__all__ = [
    "CountedRandomness",
    "OperationCounter",
    "counted",
    "key_names",
    "stackable",
    "tracing",
]
