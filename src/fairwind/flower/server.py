"""A Flower server app that trains as its run config says."""

from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairwind.engine.settings import Model
from fairwind.exchange.bounds import Bounds
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.spec import with_parameters
from fairwind.task import Task

ALPHA = "alpha"
STRATEGY = {
    "seed": int,
    "min-nodes": int,
    "eval-every": int,
    "clients-per-round": int,
    "sends": str,
    "out": str,
}


def server_app(model: Task | Model, **options: Any) -> ServerApp:
    """The server's side of a training, of a task or a model.

    The run config may say `algorithm` (adafedadam, or any spec), `alpha`, `num-server-rounds` and `timeout`
    (seconds for the replies of a round), `share` (of the weight that a client may have); and seed, min-nodes,
    eval-every, clients-per-round, sends and out, which mean what they mean to `AlgorithmStrategy`, as do
    options given here.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        said = context.run_config
        spec = str(said.get("algorithm", "adafedadam"))
        if said.get(ALPHA, "") != "":
            spec = with_parameters(spec, alpha=float(said[ALPHA]))
        chosen: dict[str, Any] = {
            name.replace("-", "_"): kind(said[name])
            for name, kind in STRATEGY.items()
            if said.get(name, "") != ""
        }
        if said.get("share", "") != "":
            chosen["bounds"] = Bounds(share=float(said["share"]))
        strategy = AlgorithmStrategy(spec, model, **{**options, **chosen})
        rounds = int(said.get("num-server-rounds", model.rounds if isinstance(model, Task) else 3))
        strategy.start(grid, num_rounds=rounds, timeout=float(said.get("timeout", 3600)))

    return app
