"""Studies of what the paper leaves open, sized for two CPU cores."""

from fairwind.paper import variants
from fairwind.spec import expand
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
