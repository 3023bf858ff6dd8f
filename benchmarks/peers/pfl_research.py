"""The task in pfl-research: FederatedAveraging on its simulated backend, in a process for each core."""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import task
import torch
from torch import distributed, nn


class Linear(nn.Linear):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        return {}


def main(rank: int) -> None:
    where = {"init_method": f"file://{os.environ['MEETING']}", "rank": rank, "world_size": task.CORES}
    distributed.init_process_group = partial(distributed.init_process_group, **where)
    torch.set_num_threads(1)

    from pfl.aggregate.simulate import SimulatedBackend  # finds the other processes
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.version import __version__

    path, rounds, _ = task.arguments()
    users = [tuple(map(torch.from_numpy, client)) for client in task.clients(path)]
    sizes = {k: len(y) for k, (_, y) in enumerate(users)}
    marks: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            marks.append(time.perf_counter())
            return False, Metrics()

    def shuffled(user: int) -> Dataset:
        order = torch.randperm(sizes[user])
        return Dataset(tuple(part[order] for part in users[user]))

    model = Linear(task.FEATURES, task.CLASSES)
    model.load_state_dict(dict(zip(("weight", "bias"), map(torch.tensor, task.zeros()), strict=True)))
    data = FederatedDataset(shuffled, MinimizeReuseUserSampler(range(len(users))), sizes)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, train_cohort_size=len(users), val_cohort_size=0),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.RATE, local_batch_size=task.BATCH),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if rank == 0:
        task.report(path, __version__, marks, *(p.detach().numpy() for p in model.parameters()))


def launch() -> int:
    """As torchrun does, which opens ports to all; here processes meet in a file and talk on the loopback."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {"TORCHELASTIC_RUN_ID": "0", "WORLD_SIZE": str(task.CORES), "GLOO_SOCKET_IFNAME": "lo"}
        shared["MEETING"] = f"{folder}/meeting"
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(task.CORES)]
        command = [sys.executable, *sys.argv]
        processes = [subprocess.Popen(command, env={**os.environ, **shared, **rank}) for rank in ranks]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main(int(os.environ["RANK"])) if "RANK" in os.environ else launch())
