"""Studies of what the paper leaves open, sized for two CPU cores."""

from fairwind.paper import variants
from fairwind.runs.spec import expand
from fairwind.study import Panel, Study

VARIANTS = tuple(
    f"{variants.__name__}:{variant.__name__}"
    for variant in (
        variants.adafedadam_unnormalised,
        variants.adafedadam_without_certainty,
        variants.adafedadam_with_fixed_betas,
        variants.fedadam_normalised,
        variants.fedadam_normalised_larger_step,
    )
)
DRAWS = ("synthetic", *expand("synthetic:seed={0,1,2,3}"))  # the paper's setup, and four other draws of it


def _parts(setup: str) -> tuple[str, ...]:
    """The algorithms that tell the parts of AdaFedAdam from each other on a setup."""
    return (
        *expand("adafedadam:alpha={0,1,4}"),
        "adafedadam:warmup=none",
        *VARIANTS[:3],
        "fedavg",
        "fednova",
        "fedadam",
        f"fedadam:lr={variants.LARGER_STEP[setup]}",
        *VARIANTS[3:],
    )


PARTS = Study(
    "parts",
    "The parts of AdaFedAdam",
    "Does α matter? Is AdaFedAdam only a larger step? What do its normalised updates, the step and the decay "
    "rates that adapt to the certainty each do?",
    (
        *(
            Panel(f"Synthetic, linear, draw {draw} of 5", setup, _parts("synthetic"), (0, 1, 2, 3))
            for draw, setup in enumerate(DRAWS, 1)
        ),
        Panel("FEMNIST, MLP, 150 rounds", "femnist", _parts("femnist"), changes={"rounds": 150}),
    ),
    charts=("curves",),
)

ADAPTIVE = ("fedavg", "fedadam", "qfedavg", "adafedadam")  # FedNova counts steps, of which Adam's are no sum
OTHER_SOLVERS = (
    *(
        Panel(f"Synthetic, {title}", "synthetic", ADAPTIVE, changes={"solver": name, "lr": lr, **more})
        for title, name, lr, more in (
            ("Adam, rate 0.001", "adam", 0.001, {}),
            ("Adam, rate 0.01", "adam", 0.01, {}),
            ("AdamW, rate 0.001, weight decay 0.01", "adamw", 0.001, {"weight_decay": 0.01}),
            ("RMSprop, rate 0.001", "rmsprop", 0.001, {}),
        )
    ),
    Panel("Synthetic, SGD with gradients of norm 1 at most", "synthetic", changes={"clip": 1.0}),
)

BEST_RATES = Panel(
    "FEMNIST, MLP: the best rate of seed 0, on three seeds",
    "femnist",
    ("fedavg:lr=10", "fedadam:lr=0.003", "fednova:lr=10", "qfedavg:lr=30", "adafedadam"),
)


def _at_equal_cost(
    title: str, setup: str, others: tuple[str, ...], seeds: tuple[int, ...], rounds: int
) -> tuple[Panel, Panel]:
    """AdaFedAdam, whose probe is an epoch's gradients, beside others that do two local epochs instead."""
    larger = f"fedadam:lr={variants.LARGER_STEP[setup.partition(':')[0]]}"
    others, changes = (*others, "fedadam", larger), {"rounds": rounds}
    return (
        Panel(f"{title}: one local epoch", setup, (*others, "adafedadam"), seeds, changes),
        Panel(f"{title}: two local epochs", setup, others, seeds, {**changes, "epochs": 2}),
    )


COST = Study(
    "cost",
    "Equal cost",
    "AdaFedAdam's probe computes as many gradients as a local epoch: does it lead over others that do a "
    "second local epoch instead?",
    (
        *(
            panel
            for draw, setup in enumerate(DRAWS, 1)
            for panel in _at_equal_cost(
                f"Synthetic, linear, draw {draw} of 5", setup, ("fedavg", "fednova"), (0, 1, 2, 3), 1000
            )
        ),
        *_at_equal_cost("FEMNIST, MLP, 150 rounds", "femnist", (), (0, 1, 2), 150),
    ),
    charts=("curves",),
)

PARTITIONS = (
    ("0.05", "Dir(0.05)"),
    ("0.1", "Dir(0.1)"),
    ("0.5", "Dir(0.5)"),
    ("1", "Dir(1)"),
    ("iid", "IID"),
)


def _unequal_data(title: str, setup: str) -> tuple[Panel, ...]:
    """Three draws of each partition; the algorithms and seeds are the paper's."""
    return tuple(
        Panel(f"{title}, {name}, draw {draw + 1} of 3", f"{setup}:beta={beta},seed={draw}")
        for draw in range(3)
        for beta, name in PARTITIONS
    )


POOLED = Study(
    "pooled",
    "Unequal data, FEMNIST's images",
    "How do the algorithms fare as the clients' labels become more alike? FEMNIST's images, pooled and dealt "
    "out to 16 clients, in place of the paper's CIFAR-10 and VGG11.",
    _unequal_data("FEMNIST pooled, MLP", "femnist-pooled"),
    charts=("curves", "labels"),
)

FEATURES = Study(
    "features",
    "Unequal data, CIFAR-10's features",
    "How do the algorithms fare as the clients' labels become more alike? A linear classifier of fixed "
    "features of 20,000 of CIFAR-10's images, in place of the paper's VGG11.",
    _unequal_data("CIFAR-10 features, linear", "cifar10-features"),
    charts=("curves", "labels"),
)
