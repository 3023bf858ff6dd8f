"""Each client trains alone, with its own samples only: the baseline of not joining a federation."""

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.contract import PersonalAlgorithm, Stateless


def local() -> PersonalAlgorithm[Stateless, Sums]:
    """As many local steps a round as in the federation, starting at the same first model, and no exchange."""
    mean = fedavg()
    return PersonalAlgorithm(mean.init, mean.client, mean.server, mean.probe, pull=0.0, alone=True)
