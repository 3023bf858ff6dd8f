"""A Flower server app that trains as its run config says."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairwind.engine.settings import Model
from fairwind.errors import InputError
from fairwind.exchange.bounds import Bounds
from fairwind.exchange.privacy import Privacy
from fairwind.flower.client import is_secure
from fairwind.flower.strategy import AlgorithmStrategy
from fairwind.runs.spec import with_parameters
from fairwind.task import Task

ALPHA = "alpha"
PRIVACY = "privacy-"  # what its settings begin with


def switch(value: Any) -> bool:
    """A run config's true or false, and no word for it."""
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is neither true nor false")
    return value


STRATEGY: dict[str, Callable[[Any], Any]] = {
    "seed": int,
    "min-nodes": int,
    "min-replies": int,
    "max-stalled": int,
    "eval-every": int,
    "evaluate-in-training": switch,
    "evaluate-share": float,
    "clients": int,
    "clients-per-round": int,
    "over-selection": float,
    "selection": str,
    "sends": str,
    "codec": str,
    "out": str,
    "metrics": str,
    "defence": str,
    "track": str,
}


def server_app(model: Task | Model, **options: Any) -> ServerApp:
    """The server's side of a training, of a task or a model.

    The run config may say `algorithm` (adafedadam, or any spec), `alpha`, `num-server-rounds` and `timeout`
    (seconds for the replies of a round), `share` (of the weight that a client may have); and what is in
    `STRATEGY`, which means what it means to `AlgorithmStrategy`, as do options given here. `privacy-clip`,
    -weight, -noise, -delta and -further are those of `Privacy`. `secure-aggregation` takes a
    `SecureStrategy`, which `client_app` obeys.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        said = context.run_config
        spec = str(said.get("algorithm", "adafedadam"))
        if said.get(ALPHA, "") != "":
            spec = with_parameters(spec, alpha=float(said[ALPHA]))
        chosen: dict[str, Any] = {
            name.replace("-", "_"): read(said[name])
            for name, read in STRATEGY.items()
            if said.get(name, "") != ""
        }
        kind: type[AlgorithmStrategy] = AlgorithmStrategy
        if (privacy := privacy_of(said)) is not None:
            _check_no_share(said, "which privacy forbids")
            chosen["privacy"] = privacy
        if is_secure(said):
            _check_no_share(said, "whom secure aggregation hides")
            from fairwind.flower.secure import SecureStrategy  # it loads Flower's cryptography

            kind = SecureStrategy
            chosen.pop("sends", None)
        elif privacy is None and said.get("share", "") != "":
            chosen["bounds"] = Bounds(share=float(said["share"]))
        strategy = kind(spec, model, **{**options, **chosen})
        rounds = int(said.get("num-server-rounds", model.rounds if isinstance(model, Task) else 3))
        strategy.start(grid, num_rounds=rounds, timeout=float(said.get("timeout", 3600)))

    return app


def privacy_of(said: Mapping[str, Any]) -> Privacy | None:
    """The privacy that a run config asks for, if it does."""
    names = [field.name for field in fields(Privacy) if field.name != "draw"]
    given: dict[str, Any] = {
        name: float(said[PRIVACY + name]) for name in names if said.get(PRIVACY + name, "") != ""
    }
    if not given:
        return None
    missing = [PRIVACY + name for name in names if name not in (*given, "further")]
    if missing:
        raise InputError(f"privacy needs {', '.join(missing)}, too")
    return Privacy(**given)


def _check_no_share(said: Mapping[str, Any], why: str) -> None:
    if said.get("share", "") not in ("", 1, 1.0):
        raise InputError(f"a cap on shares depends on other clients, {why}: give share=1.0")
