"""The setups' models: ordinary modules of PyTorch's layers."""

from fairwind.models.dense import Pixels, linear, mlp
from fairwind.models.lstm import lstm
from fairwind.models.vgg import vgg11

__all__ = ["Pixels", "linear", "lstm", "mlp", "vgg11"]
