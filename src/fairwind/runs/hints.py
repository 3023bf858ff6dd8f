"""Which known name a user may have meant by another: one spelt alike, or one of the same meaning."""

import difflib
import re
from collections.abc import Iterable

# What a thing is called elsewhere, without signs between words; the names here that it may mean.
MEANT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["learningrate", "locallr", "clientlr", "stepsize", "eta"], ("lr",)),
    **dict.fromkeys(["localepochs", "numepochs", "epoch"], ("epochs",)),
    **dict.fromkeys(["localsteps", "numsteps", "maxsteps", "localiterations", "step"], ("steps",)),
    **dict.fromkeys(["batch", "bs", "localbatchsize", "minibatch"], ("batch_size",)),
    **dict.fromkeys(["numrounds", "nrounds", "commrounds", "globalrounds", "iterations"], ("rounds",)),
    **dict.fromkeys(["fraction", "frac", "clientfraction", "samplerate", "fractionfit"], ("participation",)),
    **dict.fromkeys(["numclients", "nclients", "users"], ("clients",)),
    **dict.fromkeys(["cohort", "cohortsize", "sampledclients"], ("clients_per_round",)),
    **dict.fromkeys(["gpu", "cuda", "cpu"], ("device",)),
    **dict.fromkeys(["optimizer", "optimiser", "clientoptimizer"], ("solver", "optimizer")),
    **dict.fromkeys(["l2", "wd", "decay", "regularization"], ("weight_decay",)),
    **dict.fromkeys(["output", "outdir", "outputdir", "savedir", "dir"], ("out",)),
    **dict.fromkeys(["data", "datadir", "datapath", "root"], ("data_dir",)),
    **dict.fromkeys(["algorithm", "algo", "method", "strategy", "aggregator"], ("algorithms",)),
    **dict.fromkeys(["seed", "randomseed"], ("seeds", "seed")),
    **dict.fromkeys(["logger", "tracker", "tensorboard", "mlflow", "wandb"], ("track",)),
    **dict.fromkeys(["evaluateevery", "evalinterval", "testevery"], ("eval_every",)),
    **dict.fromkeys(["amp", "dtype", "bf16", "fp16", "tf32"], ("precision",)),
    **dict.fromkeys(["clipnorm", "maxgradnorm", "gradclip", "gradientclip"], ("clip",)),
    **dict.fromkeys(["qffl", "qfel"], ("qfedavg",)),
    **dict.fromkeys(["fedopt"], ("fedadam",)),
    **dict.fromkeys(["agnosticfl", "agnostic"], ("afl",)),
    **dict.fromkeys(["sgdm", "heavyball"], ("momentum",)),
}

# The local solver's
LOCAL = ("lr", "batch_size", "epochs", "steps", "momentum", "weight_decay", "clip", "lr_decay")


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name that another may mean."""
    plain = {_plain(each): each for each in reversed(list(known))}
    given = _plain(name)
    for meant in (given, *map(_plain, MEANT.get(given, ()))):
        if meant in plain:
            return plain[meant]
    # Half of all algorithms begin with "fed": what follows must be alike.
    cores = {each.removeprefix("fed"): each for each in plain}
    found = difflib.get_close_matches(given.removeprefix("fed"), cores, n=1, cutoff=0.6)
    return plain[cores[found[0]]] if found else None


def setting(name: str) -> str:
    """The setting of a comparison that is meant by a name; none where none is."""
    meant = near(name, (*LOCAL, "rounds", "participation", "clients_per_round"))
    return meant if meant and _plain(name) in (_plain(meant), *MEANT) else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
