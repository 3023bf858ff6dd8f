"""The task in DrJAX: a round is one jitted program that trains clients side by side, padded to a length.

`padded` has one length, that of the longest client, and lays its clients out over a device for each core.
`bucketed` has twelve lengths, which leaves little padding. It has one device: two were slower, because
steps of so few clients are too small to divide, and each bucket's sum then waits for both.
"""

import math
import time
from collections.abc import Sequence
from importlib.metadata import version

import drjax
import jax
import numpy as np
import task
from jax import numpy as jnp

BUCKETS = {"padded": 1, "bucketed": 12}
DEVICES = {"padded": task.CORES, "bucketed": 1}


def buckets(steps: Sequence[int], count: int) -> list[slice]:
    """Cuts clients, sorted by their steps, into so many groups with the fewest padded steps in all."""
    best: dict[int, tuple[float, tuple[slice, ...]]] = {0: (0, ())}  # of the clients before a cut
    for _ in range(count):
        best = {
            end: min(
                (
                    (padded + steps[end - 1] * (end - start), (*parts, slice(start, end)))
                    for start, (padded, parts) in best.items()
                    if start < end
                ),
                key=lambda found: found[0],
                default=(math.inf, ()),
            )
            for end in range(1, len(steps) + 1)
        }
    return list(best[len(steps)][1])


def stack(clients: Sequence[task.Client]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (K, L, 60), labels (K, L) and sizes (K), with L the longest size, in whole batches."""
    sizes = [len(y) for _, y in clients]
    length = task.BATCH * -(-max(sizes) // task.BATCH)
    inputs = [np.pad(x, ((0, length - len(x)), (0, 0))) for x, _ in clients]
    labels = [np.pad(y.astype(np.int32), (0, length - len(y))) for _, y in clients]
    return np.stack(inputs), np.stack(labels), np.array(sizes, np.int32)


def shuffled(key, size, length: int):
    """A client's samples in random order, then padding.

    Sorts words with random bits above an index; argsort would sort pairs, which was slower.
    """
    index = jnp.arange(length, dtype=jnp.uint32)
    low, top = jnp.uint32((1 << length.bit_length()) - 1), jnp.uint32(1 << 31)
    words = jax.random.bits(key, (length,)) & ~(low | top) | index
    return jnp.sort(jnp.where(index < size, words, words | top)) & low


def loss(params, x, y, mask):
    scores = jax.nn.log_softmax(x @ params["weight"].T + params["bias"])
    losses = -jnp.take_along_axis(scores, y[:, None], 1)[:, 0]
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1)


def epoch(params, x, y, size, key):
    """One client's; a batch that is all padding changes nothing."""
    order = shuffled(key, size, len(y)).reshape(-1, task.BATCH)
    mask = (jnp.arange(len(y)) < size).astype(x.dtype).reshape(order.shape)

    def step(params, batch):
        samples, mask = batch
        gradient = jax.grad(loss)(params, x[samples], y[samples], mask)
        return jax.tree.map(lambda p, g: p - task.RATE * g, params, gradient), None

    return jax.lax.scan(step, params, (order, mask))[0]


def bucket(clients: int):
    @drjax.program(clients=clients)
    def total(params, x, y, sizes, keys):
        """The sum of trained parameters, each client's times its size."""
        trained = drjax.map_fn(epoch, (drjax.broadcast(params), x, y, sizes, keys))
        weighted = drjax.map_fn(lambda p, size: jax.tree.map(lambda p: p * size, p), (trained, sizes))
        return drjax.reduce_sum(weighted)

    return total


def main() -> None:
    path, rounds, variant = task.arguments()
    clients = sorted(task.clients(path), key=lambda client: len(client[1]))
    samples = sum(len(y) for _, y in clients)
    parts = buckets([-(-len(y) // task.BATCH) for _, y in clients], BUCKETS[variant])
    programs = [bucket(part.stop - part.start) for part in parts]
    jax.config.update("jax_num_cpu_devices", DEVICES[variant])
    jax.set_mesh(jax.make_mesh((DEVICES[variant],), ("clients",), (jax.sharding.AxisType.Auto,)))
    data = jax.device_put([stack(clients[part]) for part in parts], jax.P("clients"))

    @jax.jit
    def round(params, key, data):
        keys = jax.random.split(key, len(clients))
        sums = [
            program(params, *stacked, keys[part])
            for program, stacked, part in zip(programs, data, parts, strict=True)
        ]
        return jax.tree.map(lambda *p: sum(p) / samples, *sums)

    params = dict(zip(("weight", "bias"), map(jnp.asarray, task.zeros()), strict=True))
    marks = []
    for key in jax.random.split(jax.random.key(0), rounds):
        params = jax.block_until_ready(round(params, key, data))
        marks.append(time.perf_counter())
    versions = f"{version('drjax')}, jax {version('jax')}"
    task.report(path, versions, marks, params["weight"], params["bias"])


if __name__ == "__main__":
    main()
