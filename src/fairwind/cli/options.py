"""Types of options, as --help shows them: without a default where the text says what happens without one."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

Whole = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Epochs = Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="INT [INT]", help_behavior_hint="")]
LocalSolver = Annotated[
    Literal["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop"] | None,
    tyro.conf.arg(metavar="{sgd,momentum,nesterov,adam,adamw,rmsprop}", help_behavior_hint=""),
]
