"""The paper's studies as plain data, and the controls that a sceptical reader asks for.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024, Section 6 and appendix C.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from fairwind.algorithms import PAPER
from fairwind.paper import two_cores
from fairwind.paper.variants import LARGER_STEP
from fairwind.runs.spec import expand, with_parameters
from fairwind.study import Panel, Study

Scale = Literal["smoke", "reduced", "full"]

BASELINES = ("fedavg", "fedadam", "fednova", "qfedavg")
TITLES = {
    "femnist": "FEMNIST, MLP",
    "cifar10": "CIFAR-10, VGG11",
    "sent140": "Sent140, LSTM",
    "synthetic": "Synthetic, linear",
}


def _specs(*specs: str) -> tuple[str, ...]:
    return tuple(each for spec in specs for each in expand(spec))


CONVERGENCE = Study(
    "convergence",
    "Convergence and fairness",
    "Does AdaFedAdam converge faster than the others, and serve clients more evenly, without tuning?",
    tuple(Panel(title, name, published=f"convergence/{name}") for name, title in TITLES.items()),
    charts=("curves", "distribution", "targets"),
)

ALPHA = Study(
    "alpha",
    "The choice of α",
    "What does a larger α buy in fairness, what does it cost in accuracy, and where do the baselines lie?",
    (
        Panel(TITLES["synthetic"], "synthetic", _specs("adafedadam:alpha={0,0.5,1,2,3,4,6,8}", *BASELINES)),
        Panel(TITLES["femnist"], "femnist", _specs("adafedadam:alpha={0,1,2,4}", *BASELINES)),
        Panel(TITLES["cifar10"], "cifar10", _specs("adafedadam:alpha={0,1,3}", *BASELINES), seeds=(0,)),
    ),
    charts=("pareto", "curves", "rsd"),
)

RESOURCES = Study(
    "resources",
    "Unequal resources",
    "Does the order hold when every client draws its number of local epochs from {1, 2, 3} in every round?",
    (Panel(TITLES["cifar10"], "cifar10", changes={"epochs": (1, 3)}, published="resources"),),
)

HETEROGENEITY = Study(
    "heterogeneity",
    "Unequal data",
    "How do the algorithms fare as the clients' labels become more alike?",
    (
        *(
            Panel(f"CIFAR-10, Dir({beta})", f"cifar10:beta={beta}", published=f"heterogeneity/{beta}")
            for beta in ("0.05", "0.1", "0.5", "1")
        ),
        Panel("CIFAR-10, IID", "cifar10:beta=iid"),
    ),
    charts=("curves", "labels"),
)

SOLVERS = Study(
    "solvers",
    "Local solvers",
    "Does AdaFedAdam work with momentum in the clients' SGD, with clipped gradients, with Adam, AdamW and "
    "RMSprop?",
    (
        *(
            Panel(f"Synthetic, {title}", "synthetic", changes={"solver": name}, published=f"solvers/{name}")
            for name, title in (
                ("sgd", "SGD"),
                ("momentum", "momentum 0.9"),
                ("nesterov", "Nesterov momentum 0.9"),
            )
        ),
        *two_cores.OTHER_SOLVERS,
    ),
)

READINGS = Study(
    "readings",
    "Which Synthetic did the paper use?",
    "The paper names LEAF's generator, but neither its labels, its sizes nor its draw: which reading comes "
    "nearest to the published rows?",
    tuple(
        Panel(title, spec, published="convergence/synthetic")
        for title, spec in (
            ("LEAF, labels as described, 10 classes", "synthetic"),
            ("LEAF, labels as described, 10 classes, draw 0", "synthetic:seed=0"),
            ("LEAF, labels as described, 10 classes, draw 1", "synthetic:seed=1"),
            ("LEAF, labels as described, 5 classes", "synthetic:classes=5"),
            ("LEAF, labels of its script, 10 classes", "synthetic:labels=script"),
            ("LEAF, labels of its script, 5 classes", "synthetic:labels=script,classes=5"),
            ("LEAF, labels as described, Li's sizes", "synthetic:sizes=li"),
            ("LEAF, labels as described, Li's sizes, draw 0", "synthetic:sizes=li,seed=0"),
            ("LEAF, labels as described, Li's sizes, draw 1", "synthetic:sizes=li,seed=1"),
            ("LEAF, labels of its script, Li's sizes", "synthetic:labels=script,sizes=li"),
            ("Li's Synthetic(0, 0)", "synthetic-li:alpha=0,beta=0"),
            ("Li's Synthetic(0.5, 0.5)", "synthetic-li:alpha=0.5,beta=0.5"),
            ("Li's Synthetic(1, 1)", "synthetic-li"),
            ("Li's Synthetic(1, 1), LEAF's sizes", "synthetic-li:sizes=leaf"),
        )
    ),
    charts=("readings", "curves"),
)

STEP_RULES = _specs("adafedadam:warmup={0,6,none}")


def _controls() -> Iterable[Panel]:
    for name in ("synthetic", "femnist", "cifar10"):
        seeds = (0,) if name == "cifar10" else (0, 1, 2)
        title = TITLES[name]
        larger = _specs("fedadam", f"fedadam:lr={LARGER_STEP[name]}", "adafedadam")
        yield Panel(f"{title}: only a larger step?", name, larger, seeds)
        yield Panel(f"{title}: what α itself buys", name, _specs("adafedadam:alpha={0,1,3}"), seeds)
        yield Panel(f"{title}: the step rules", name, STEP_RULES, seeds)
        probed = ("qfedavg", "adafedadam")
        yield Panel(f"{title}: probes on 512 samples", name, probed, seeds, {"probe_samples": 512})
        rates = ("fedavg", "fedavg:lr=0.1")
        yield Panel(f"{title}: FedAvg's server rate in the authors' code", name, rates, seeds)
    yield Panel("CIFAR-10, VGG11: He's initialisation", "cifar10:init=he", PAPER, (0,))
    for draw in (1, 2):
        yield Panel(f"CIFAR-10, VGG11: partition draw {draw}", f"cifar10:seed={draw}", PAPER, (0,))


CONTROLS = Study(
    "controls",
    "Controls",
    "Is the gain only a larger step? What does α buy alone? How much hangs on the step rule, the probe, the "
    "initial weights and the draw of the partition?",
    tuple(_controls()),
    charts=("curves",),
)

TUNED = Study(
    "tuned",
    "Tuned baselines",
    "AdaFedAdam is said to need no tuning: does it still lead when every baseline has its best server rate?",
    (
        *(
            Panel(
                TITLES[name],
                name,
                _specs(
                    "fedavg:lr={0.3,1,1.5,2,3,5,10,30}",
                    "fedadam:lr={0.0003,0.001,0.003,0.01,0.03,0.1,0.3}",
                    f"fednova:lr={{0.3,1,1.5,2,3{',5,10,30' if name == 'femnist' else ''}}}",
                    "qfedavg:lr={0.3,1,3,10,30,100}",
                    "adafedadam:lr={0.0003,0.001,0.003,0.01,0.03}",
                ),
                seeds=(0, 1, 2) if name == "synthetic" else (0,),
            )
            for name in ("synthetic", "femnist", "cifar10")
        ),
        two_cores.BEST_RATES,
    ),
    charts=("tuned",),
)

PRECISION = Study(
    "precision",
    "Precision",
    "Do bf16 and tf32 move VGG11's results by more than another seed does?",
    tuple(
        Panel(
            f"CIFAR-10, VGG11, 30 rounds, {precision}",
            "cifar10",
            ("fedavg", "fedadam", "adafedadam"),
            changes={"rounds": 30, "precision": precision},
        )
        for precision in ("float32", "tf32", "bf16")
    ),
    charts=("curves",),
)

STUDIES = {
    study.name: study
    for study in (
        CONVERGENCE,
        ALPHA,
        RESOURCES,
        HETEROGENEITY,
        SOLVERS,
        READINGS,
        CONTROLS,
        TUNED,
        PRECISION,
        two_cores.PARTS,
        two_cores.COST,
        two_cores.POOLED,
        two_cores.FEATURES,
    )
}


THEORY = "theory"  # the study that trains nothing: paper/theory


class Reduction(NamedTuple):
    """How a setup is made smaller: parameters of its spec, and rounds."""

    parameters: dict[str, int]
    rounds: int


REDUCED = {
    "smoke": {
        "femnist": Reduction({}, 2),
        "femnist-pooled": Reduction({"clients": 2}, 2),
        "cifar10": Reduction({"clients": 2}, 1),
        "cifar10-features": Reduction({"clients": 2}, 1),
        "sent140": Reduction({"clients": 3}, 1),
        "synthetic": Reduction({"clients": 10}, 3),
        "synthetic-li": Reduction({"clients": 10}, 3),
    },
    "reduced": {
        "femnist": Reduction({"clients": 60}, 60),
        "femnist-pooled": Reduction({}, 20),
        "cifar10": Reduction({}, 20),
        "cifar10-features": Reduction({}, 20),
        "sent140": Reduction({}, 50),
        "synthetic": Reduction({}, 300),
        "synthetic-li": Reduction({}, 300),
    },
}


def scaled(study: Study, scale: Scale) -> Study:
    """The study as published (full), smaller (reduced), or only to see that it runs (smoke)."""
    if scale == "full":
        return study
    panels = []
    for panel in study.panels:
        smaller = REDUCED[scale][panel.setup.partition(":")[0]]
        changes = {**panel.changes, "rounds": min(smaller.rounds, panel.changes.get("rounds", 10**9))}
        if scale == "smoke":
            changes["eval_every"] = 1
            if "precision" in changes:
                changes["precision"] = "float32"  # the others are a GPU's
        setup = with_parameters(panel.setup, **smaller.parameters)
        seeds = panel.seeds[:1] if scale == "smoke" else panel.seeds
        panels.append(replace(panel, setup=setup, changes=changes, seeds=seeds))
    return replace(study, panels=tuple(panels))
