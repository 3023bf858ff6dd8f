"""data and list: what there is to train on and with."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from fairwind import algorithms, setups
from fairwind.cli.options import described, values
from fairwind.cli.terminal import out, say
from fairwind.runs.references import is_reference, load_task
from fairwind.runs.spec import Parameters, parameters
from fairwind.setups import Where

WIDEST = max(map(len, (*setups.SETUPS, *algorithms.REGISTRY)))


@described
@dataclass(frozen=True)
class Data:
    """Prepare a setup's data: download or read it, check it, deal it to clients, and keep that in a cache.

    Shows what was made, and draws how labels are spread over the clients. Comparisons do this by themselves
    where it has not been done. Of a task of your own the clients are shown.
    """

    task: Annotated[str, tyro.conf.Positional, values(str, metavar="TASK")]
    """The setup; parameters follow a colon, as in cifar10:beta=0.5. Or a task of your own, FILE.py:NAME."""
    data_dir: Path | None = None
    """Folder with the data set's files. If not given, data that was prepared before is shown, or the Hugging
    Face hub's is downloaded (to have the hub's beside another, name another --cache)."""
    glove: Path | None = None
    """File, or folder, of GloVe's word vectors for sent140 (the data folder is searched if not given)."""
    cache: Path | None = None
    """Where to keep it (XDG_CACHE_HOME/fairwind, or ~/.cache/fairwind, if not given)."""
    clients: int | None = None
    """Number of clients; the same as SETUP:clients=…"""

    def run(self) -> None:
        from fairwind.report import data_table, write_labels  # charts need a second to load

        if is_reference(self.task):
            out.print(data_table(self.task, load_task(self.task).federation))
            return
        spec = setups.with_clients(self.task, self.clients)
        entry = setups.entry(spec, Where(self.data_dir, self.glove, self.cache), say)
        federation = entry.load()
        out.print(data_table(spec, federation))
        for path in (entry.path, *write_labels(entry.path, federation)):
            out.print(str(path), soft_wrap=True, markup=False)


@described
@dataclass(frozen=True)
class List:
    """Show the setups and the algorithms, with their parameters and where they come from."""

    def run(self) -> None:
        described = {}
        for name, s in setups.SETUPS.items():
            local = f"batch size {s.solver.batch_size}, epochs {s.solver.epochs}, lr {s.solver.lr}"
            text = f"{(s.builder.__doc__ or '').rstrip()} {s.rounds} rounds; local SGD, {local}."
            described[name] = (s.parameters, text)
        out.print(_listing("setups", described))
        for needs, title in algorithms.NEEDS.items():
            builders = {n: b for n, b in algorithms.REGISTRY.items() if isinstance(b(), needs)}
            documents = {name: (parameters(b), _document(b)) for name, b in builders.items()}
            out.print(_listing(f"algorithms that need {title}", documents))
        for name, names in algorithms.SETS.items():
            if name != "all":
                out.print(f"[bold]--algorithms {name}[/]: {' '.join(names)}", highlight=False)


def _document(builder: Any) -> str:
    """What a builder makes, then its file's citation."""
    _, _, citation = (sys.modules[builder.__module__].__doc__ or "").partition("\n\n")
    return f"{(builder.__doc__ or '').partition(chr(10))[0]}\n\n{citation}"


def _listing(title: str, entries: dict[str, tuple[Parameters, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(min_width=WIDEST)
    for name, (known, text) in entries.items():
        first, _, rest = text.partition("\n\n")
        given = ", ".join(f"{key}={_value(default)}" for key, (_, default) in known.items())
        source = " ".join(rest.split())
        table.add_row(f"[bold]{name}[/]", f"{first}\n[cyan]{given or 'no parameters'}[/]\n[dim]{source}[/]")
    return table


def _value(default: Any) -> str:
    return "none" if default is None else str(default)
