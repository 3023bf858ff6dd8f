"""The setups' models: ordinary modules of PyTorch's layers."""

from fairwind.models.dense import linear, mlp
from fairwind.models.lstm import lstm
from fairwind.models.norms import to_group_norm
from fairwind.models.pixels import Pixels
from fairwind.models.vgg import vgg11

__all__ = ["Pixels", "linear", "lstm", "mlp", "to_group_norm", "vgg11"]
