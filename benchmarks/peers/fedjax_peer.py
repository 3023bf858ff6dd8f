"""The task in FedJAX: its own FedAvg, which fills up a client's last batch with more of its samples."""

import time
from importlib.metadata import version

import fedjax
import jax
import numpy as np
import task
from fedjax.algorithms import fed_avg


def losses(params, batch, rng):
    scores = jax.nn.log_softmax(batch["x"] @ params["weight"].T + params["bias"])
    return -jax.numpy.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def main() -> None:
    path, rounds, _ = task.arguments()
    clients = [fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}) for x, y in task.clients(path)]
    sgd = fedjax.optimizers.sgd
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=task.BATCH)
    algorithm = fed_avg.federated_averaging(fedjax.grad(losses), sgd(task.RATE), sgd(1.0), batches)
    state = algorithm.init(dict(zip(("weight", "bias"), map(jax.numpy.asarray, task.zeros()), strict=True)))
    marks = []
    for key in jax.random.split(jax.random.PRNGKey(0), rounds):
        keys = np.asarray(jax.random.split(key, len(clients)))
        state, _ = algorithm.apply(state, list(zip(range(len(clients)), clients, keys, strict=True)))
        jax.block_until_ready(state.params)
        marks.append(time.perf_counter())
    versions = f"{version('fedjax')}, jax {version('jax')}"
    task.report(path, versions, marks, state.params["weight"], state.params["bias"])


if __name__ == "__main__":
    main()
