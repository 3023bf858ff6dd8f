"""Types of options, as --help shows them."""

from pathlib import Path
from typing import Annotated

import tyro

Whole = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
