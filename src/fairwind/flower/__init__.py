"""Fairwind's algorithms on Flower: a strategy, a client app and a server app. `pip install fairwind[flower]`.

The algorithms are those of the simulator, and so is local training; see `fairwind.exchange` for what clients
and server tell each other.
"""

from fairwind.flower.client import client_app
from fairwind.flower.secure import SecureStrategy, secure_client_app
from fairwind.flower.server import server_app
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.flower.weights import WeightsStrategy

__all__ = [
    "AlgorithmStrategy",
    "SecureStrategy",
    "WeightsStrategy",
    "client_app",
    "secure_client_app",
    "server_app",
]
