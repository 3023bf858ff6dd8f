"""The task in Flower's simulation: its own FedAvg, and a client in PyTorch or in NumPy."""

import time
from importlib.metadata import version

import plain
import task
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def main() -> None:
    path, rounds, variant = task.arguments()
    count = len(task.clients(path))
    marks: list[float] = []
    server, client = ServerApp(), ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        data = task.clients(path)[int(context.node_config["partition-id"])]  # read once by each worker
        trained = plain.EPOCHS[variant](*message.content["arrays"].to_numpy_ndarrays(), data)
        metrics = MetricRecord({"num-examples": len(data[1])})
        reply = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
        return Message(reply, reply_to=message)

    def mark(round: int, arrays: ArrayRecord) -> None:
        if round:
            marks.append(time.perf_counter())

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0, min_train_nodes=count, min_available_nodes=count)
        result = strategy.start(grid, ArrayRecord(task.zeros()), rounds, evaluate_fn=mark)
        task.report(path, version("flwr"), marks, *result.arrays.to_numpy_ndarrays())

    resources = {"init_args": {"num_cpus": task.CORES}, "client_resources": {"num_cpus": 1}}
    run_simulation(server, client, count, backend_config=resources)


if __name__ == "__main__":
    main()
