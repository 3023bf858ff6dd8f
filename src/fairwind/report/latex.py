"""Tables in LaTeX, for booktabs."""

from typing import NamedTuple

Value = tuple[float | None, float | None]  # mean and standard deviation over seeds

ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "^": r"\^{}",
    "~": r"\~{}",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "–": "--",
    "’": "'",
}


class Row(NamedTuple):
    name: str
    ours: list[Value]
    paper: list[tuple[float, float]]  # empty where the paper has none
    best: list[bool]


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[Row]


def tables(title: str, given: list[Table]) -> str:
    """All tables of a study, one after another."""
    return "\n".join([f"% {title}: made by Fairwind; needs \\usepackage{{booktabs}}", *map(_table, given)])


def _table(table: Table) -> str:
    beside = any(row.paper for row in table.rows)
    who = ("ours", "paper") if beside else ("",)
    head = " & ".join(f"{escape(name)}{f' ({w})' if w else ''}" for name in table.columns for w in who)
    lines = []
    for row in table.rows:
        cells = []
        for i, (value, best) in enumerate(zip(row.ours, row.best, strict=True)):
            text = _value(*value)
            cells.append(rf"\textbf{{{text}}}" if best else text)
            if beside:
                cells.append(_value(*row.paper[i]) if row.paper else "--")
        lines.append(f"{escape(row.name)} & {' & '.join(cells)} \\\\")
    columns = "l" + "r" * len(table.columns) * len(who)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{escape(table.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            rf" & {head} \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _value(mean: float | None, std: float | None) -> str:
    """A mean with its spread over seeds, or without where there is one seed."""
    if mean is None:
        return "--"
    return f"{mean:.2f}" if std is None else rf"{mean:.2f} $\pm$ {std:.2f}"


def escape(text: str) -> str:
    """Text as LaTeX takes it."""
    return "".join(ESCAPES.get(character, character) for character in text)
