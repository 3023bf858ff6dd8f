"""The setups' models: ordinary modules."""

from fairwind.models.dense import Pixels, linear, mlp
from fairwind.models.lstm import LSTM, lstm
from fairwind.models.vgg import Convolution, vgg11

__all__ = ["LSTM", "Convolution", "Pixels", "linear", "lstm", "mlp", "vgg11"]
