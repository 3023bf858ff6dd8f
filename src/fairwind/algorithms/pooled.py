"""All data in one place: the baseline that a federation would like to reach without moving its data."""

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.contract import PooledAlgorithm, Stateless


def pooled() -> PooledAlgorithm[Stateless, Sums]:
    """One model, trained on the training samples of all clients for as many epochs as each client trains."""
    mean = fedavg()  # of a single client: its own model
    return PooledAlgorithm(mean.init, mean.client, mean.server, mean.probe)
