"""The report says what the run directory holds, to everybody, without asking the network for anything."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from fairwind.report import charts, spread, summary_table, write_report
from fairwind.report.finding import finding
from fairwind.report.page import figures, page
from fairwind.report.record import read_record
from fairwind.report.table import MEASURES, display_name
from fairwind.report.theme import PALETTE, styles, theme

KEYS = [measure.key for measure in MEASURES]
LOWEST_IS_BEST = {
    "std", "std_weighted", "std_beyond_noise", "rsd_error", "gini", "loss_avg", "loss_worst30",
}  # fmt: skip
HOSTILE = "</script><script>alert('x')</script>\"&[bold]"


def write_run(
    directory: Path,
    algorithms: list[str],
    *,
    seeds: int = 3,
    clients: int = 12,
    level: dict[str, float] | None = None,
) -> dict[str, Any]:
    """A run directory of made-up numbers; `level` is the accuracy an algorithm ends near, 80 unless told."""
    rng = np.random.default_rng(7)
    directory.mkdir(exist_ok=True)
    runs, history, accuracy = [], [], []
    for algorithm in algorithms:
        end = (level or {}).get(algorithm, 80.0)
        for seed in range(seeds):
            for t in range(0, 41, 10):
                final = {key: float(end * t / 40 + rng.normal(0, 0.2)) for key in KEYS}
                final |= {key: float(rng.uniform(0.1, 0.9)) for key in sorted(LOWEST_IS_BEST | {"jain"})}
                certainty = 1.5 if algorithm.startswith("adafedadam") and t else None
                history.append(
                    {"algorithm": algorithm, "seed": seed, "round": t, **final, "certainty": certainty}
                )
            run = {"algorithm": algorithm, "seed": seed, "rounds": 40, "left_out": 0, "stalled_rounds": 0}
            runs.append(run | {"final": final})
            accuracy.append(np.clip(rng.normal(end, 10, clients), 0, 100))
    summary = []
    for algorithm in algorithms:
        values = {k: [r["final"][k] for r in runs if r["algorithm"] == algorithm] for k in KEYS}
        spread = {k: float(np.std(v, ddof=1)) if seeds > 1 else 0.0 for k, v in values.items()}
        summary.append(
            {"algorithm": algorithm}
            | {k: {"mean": float(np.mean(v)), "std": spread[k]} for k, v in values.items()}
        )
    results = {
        "setup": "synthetic",
        "config": {"algorithms": algorithms, "solver": {"name": "sgd", "lr": 0.01}, "probe_samples": None},
        "environment": {"fairwind": "0.1.0", "commit": "abc1234", "cpu": "<i>cpu</i>"},
        "federation": {
            "name": "Synthetic", "clients": clients, "train_samples": 700, "test_samples": 180,
            "smallest": 4, "median": 16, "largest": 80,
        },
        "runs": runs,
        "summary": summary,
        "timing": {"seconds": 75.0, "rounds_per_second": 12.3, "client_steps_per_second": None},
    }  # fmt: skip
    matrix = np.array(accuracy, dtype=np.float32)
    matrix[:, 0] = np.nan  # a client without test samples
    sizes = np.arange(1, clients + 1, dtype=np.int64)
    arrays = {"accuracy": matrix, "loss": matrix / 10, "train_size": sizes * 10, "test_size": sizes - 1}
    save_file(arrays, directory / "clients.safetensors")
    (directory / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    (directory / "results.json").write_text(json.dumps(results))
    return results


def save_results(directory: Path, results: dict[str, Any]) -> None:
    (directory / "results.json").write_text(json.dumps(results))


def html_of(directory: Path) -> str:
    record = read_record(directory)
    return page(record, figures(record))


class Reader(HTMLParser):
    """What a browser would see: links, scripts, headings, and the tables as lists of (text, bold) cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.rows: list[list[tuple[str, bool]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in {"src", "href", "srcset", "action", "data"}
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in {"th", "td"}:
            self.rows[-1].append(("", False))
        if tag == "b":
            self.rows[-1][-1] = (self.rows[-1][-1][0], True)
        if tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append("/" + tag)

    def handle_data(self, data: str) -> None:
        inside = [tag for tag in ("th", "td") if self.tags.count(tag) > self.tags.count("/" + tag)]
        if inside:
            text, bold = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, bold)
        if self.tags.count("h2") > self.tags.count("/h2"):
            self.headings[-1] += data
        if self.tags.count("script") == self.tags.count("/script"):
            self.text += data


def printed(results: dict[str, Any], width: int = 80) -> str:
    out = StringIO()
    Console(file=out, width=width, color_system="standard", force_terminal=True).print(summary_table(results))
    return out.getvalue()


ALGORITHMS = ["adafedadam", "fedavg", "q-fedavg:q=0.1", "adafedadam:alpha=2,eps=1e-8"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    directory = tmp_path_factory.mktemp("run")
    results = write_run(directory, ALGORITHMS)
    results["summary"][1]["std"] = {"mean": None, "std": None}
    results["summary"][0]["worst30"]["mean"] = None
    results["runs"][4]["left_out"] = 3
    save_results(directory, results)
    return directory, write_report(directory)


def test_every_figure_is_a_pdf_and_a_png_and_nothing_is_left_behind(report: tuple[Path, list[Path]]) -> None:
    directory, written = report
    names = ["average", "certainty", "clients", "distribution", "worst30"]
    expected = {directory / "figures" / f"{name}.{kind}" for name in names for kind in ("pdf", "png")}
    assert set(written) == expected | {directory / "report.html"}
    assert set((directory / "figures").iterdir()) == expected
    for path in expected:
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG\r\n\x1a\n")


def test_the_page_asks_the_network_for_nothing(report: tuple[Path, list[Path]]) -> None:
    html = (report[0] / "report.html").read_text(encoding="utf-8")
    assert Reader(html).links == ["data:,"]
    assert "default-src 'none'" in html  # so a browser would refuse, too
    own = re.sub(r"<script>.*?</script>", "", html, count=1, flags=re.DOTALL)  # all but Vega
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|@import|url\(", own)
    assert set(re.findall(r"https?://[^\"' ]+", own)) == {re.search(r"\$schema\":\"([^\"]+)", own)[1]}  # type: ignore[index]


def test_every_algorithm_is_in_both_tables(report: tuple[Path, list[Path]]) -> None:
    html = (report[0] / "report.html").read_text(encoding="utf-8")
    names = ["AdaFedAdam", "FedAvg", "q-FedAvg (q=0.1)", "AdaFedAdam (alpha=2, eps=1e-8)"]
    first_cells = [row[0][0] for row in Reader(html).rows]
    assert first_cells == ["", *names] * 2
    assert names == [display_name(label) for label in ALGORITHMS]


def test_bold_on_the_page_is_the_true_best(report: tuple[Path, list[Path]]) -> None:
    directory = report[0]
    summary = json.loads((directory / "results.json").read_text())["summary"]
    rows = Reader((directory / "report.html").read_text(encoding="utf-8")).rows
    tables = [rows[:5], rows[5:]]
    columns = [(table, column) for table in tables for column in range(1, len(table[0]))]
    assert len(columns) == len(KEYS)
    for key, (table, column) in zip(KEYS, columns, strict=True):
        means = [row[key]["mean"] for row in summary]
        known = [mean for mean in means if mean is not None]
        best = means.index(min(known) if key in LOWEST_IS_BEST else max(known))
        assert [row[column][1] for row in table[1:]] == [i == best for i in range(len(means))], key
        for row, mean in zip(table[1:], means, strict=True):
            text = row[column][0].split()[0]
            assert text == "–" if mean is None else float(text) == pytest.approx(mean, abs=0.005)


def test_bold_in_the_terminal_is_the_true_best(report: tuple[Path, list[Path]]) -> None:
    results = json.loads((report[0] / "results.json").read_text())
    bold = re.findall(r"\x1b\[1m([\d.]+)\x1b", printed(results))
    best = {
        key: (min if key in LOWEST_IS_BEST else max)(
            row[key]["mean"] for row in results["summary"] if row[key]["mean"] is not None
        )
        for key in ("avg", "std", "worst30", "worst", "avg_weighted")
    }
    assert sorted(bold) == sorted(f"{value:.2f}" for value in best.values())


def test_the_terminal_table_fits_80_columns_without_breaking_a_number(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam:alpha=2,eps=1e-8", "fedavg", "fedadagrad"])
    lines = re.sub(r"\x1b\[[\d;]*m", "", printed(results)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(bool(re.fullmatch(r".*(\d+\.\d\d ±\d+\.\d\d\s+){5}", line + " ")) for line in lines) == 3


def test_equal_as_printed_is_equally_best(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "fedadam", "fednova"])
    for row, mean in zip(results["summary"], (80.001, 80.002, 79.0), strict=True):
        row["avg"]["mean"] = mean
    assert re.findall(r"\x1b\[1m(80.00)\x1b", printed(results)) == ["80.00", "80.00"]


def test_what_was_left_out_is_said_and_only_then(report: tuple[Path, list[Path]], tmp_path: Path) -> None:
    results = json.loads((report[0] / "results.json").read_text())
    said = "FedAvg: 3 client contributions left out, being not finite."
    assert said in Reader((report[0] / "report.html").read_text(encoding="utf-8")).text
    assert said in printed(results)
    assert "left out, being" not in printed(write_run(tmp_path, ["fedavg"]))


def test_a_hostile_label_stays_text(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam", HOSTILE])
    write_report(tmp_path)  # the expressions that Vega parses hold the label, too
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    seen = Reader(html)
    assert seen.tags.count("script") == seen.tags.count("/script") == 2
    assert "alert('x')</script>" not in html
    assert HOSTILE in [row[0][0] for row in seen.rows]
    assert "i" not in seen.tags  # <i> in the environment
    assert "<i>cpu</i>" in seen.text
    assert "[bold]" in re.sub(r"\s", "", printed(results))


def test_one_seed_has_neither_spread_nor_band(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam", "fedavg"], seeds=1)
    record = read_record(tmp_path)
    assert "±" not in printed(results)
    assert "±" not in Reader(html_of(tmp_path)).text
    assert "area" not in [layer["mark"]["type"] for layer in figures(record)["average"]["layer"]]
    assert "(one seed)" in finding(results)


def test_bands_reach_from_the_lowest_seed_to_the_highest(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg"])
    record = read_record(tmp_path)
    values = [row["avg"] for row in record.history if row["round"] == 40]
    spec = figures(record)["average"]
    band = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "area")
    data = band.get("data", spec.get("data"))
    rows = data["values"] if "values" in data else spec["datasets"][data["name"]]
    assert rows[-1]["round"] == 40
    assert (rows[-1]["low"], rows[-1]["high"]) == pytest.approx((min(values), max(values)), abs=1e-3)
    assert rows[-1]["mean"] == pytest.approx(np.mean(values), abs=1e-3)


def test_certainty_is_shown_where_there_is_one(tmp_path: Path) -> None:
    write_run(tmp_path / "with", ["adafedadam", "fedavg"])
    write_run(tmp_path / "without", ["fedavg", "fedadam"])
    assert "Certainty" in Reader(html_of(tmp_path / "with")).headings
    assert "Certainty" not in Reader(html_of(tmp_path / "without")).headings
    assert "certainty" not in figures(read_record(tmp_path / "without"))


def test_values_that_are_not_there_break_nothing(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam", "fedavg"])
    for row in results["summary"]:
        row.update({key: {"mean": None, "std": None} for key in KEYS})
    save_results(tmp_path, results)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | dict.fromkeys([*KEYS, "certainty"])) for row in rows]
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    nothing = np.full((6, 12), np.nan, dtype=np.float32)
    sizes = np.zeros(12, dtype=np.int64)
    arrays = {"accuracy": nothing, "loss": nothing, "train_size": sizes, "test_size": sizes}
    save_file(arrays, tmp_path / "clients.safetensors")
    write_report(tmp_path)
    seen = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No run ended with a defined accuracy." in seen.text
    assert not any(bold for row in seen.rows for _, bold in row)


def set_means(
    worst30: tuple[float, float], avg: tuple[float, float], spread: float
) -> Callable[..., dict[str, Any]]:
    def change(results: dict[str, Any]) -> dict[str, Any]:
        for i, row in enumerate(results["summary"]):
            row["worst30"] = {"mean": worst30[i], "std": spread}
            row["avg"] = {"mean": avg[i], "std": spread}
        return results

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            set_means((60, 50), (90, 80), 0.5),
            ["AdaFedAdam serves", "10.0 points ahead of FedAvg", "is the best too"],
        ),
        (
            set_means((50, 60), (90, 80), 0.5),
            ["FedAvg serves", "10.0 points behind the best, AdaFedAdam’s"],
        ),
        (set_means((60, 59), (90, 80), 2.0), ["1.0 points ahead", "within the spread of seeds"]),
    ],
)
def test_the_finding_follows_the_numbers(change: Callable[..., Any], said: list[str], tmp_path: Path) -> None:
    sentence = finding(change(write_run(tmp_path, ["adafedadam", "fedavg"])))
    assert all(words in sentence for words in said), sentence
    assert ("spread" in sentence) == any("spread" in words for words in said)


def test_of_thousands_of_clients_a_sample_is_shown_from_worst_to_best(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg", "fedadam"], clients=3500, level={"fedavg": 60.0})
    record = read_record(tmp_path)
    means = np.nanmean(record.score[:, 1:], axis=0)
    shown = spread.shown_clients(record)
    assert len(shown) == len(set(shown.tolist())) == spread.MAX_CLIENTS
    assert (shown[0], shown[-1]) == (1 + means.argmin(), 1 + means.argmax())
    html = html_of(tmp_path)
    assert "Of 3,499 clients 300 are shown" in html
    assert "1 client without test samples left out." in html
    assert len(html) < 2_000_000


def test_curves_are_thinned_but_keep_their_ends(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg"], seeds=1)
    row = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])
    lines = [json.dumps(row | {"round": t}) for t in range(3000)]
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    record = read_record(tmp_path)
    spec = figures(record)["average"]
    assert "Of 3,000 evaluated rounds 400 are drawn" in page(record, figures(record))
    rounds = [[r["round"] for r in rows] for rows in spec["datasets"].values()]
    assert all(len(ts) == charts.MAX_POINTS and (ts[0], ts[-1]) == (0, 2999) for ts in rounds)


def test_adafedadam_has_its_colour_in_any_company_and_no_two_look_alike() -> None:
    labels = [f"adafedadam:alpha={a}" for a in range(6)] + [
        "fedavg",
        "fedadam",
        "fedyogi",
        "mine",
        "yours",
        "theirs",
    ]
    assert len(set(styles(labels))) == len(labels)
    for company in (
        ["adafedadam"],
        ["fedavg", "adafedadam"],
        ["mine", "fedavg", "adafedadam", "adafedadam:alpha=2"],
    ):
        colours = theme(company, "light")["range"]["category"]
        assert colours[company.index("adafedadam")] == PALETTE["light"]["adafedadam"]


def test_the_distribution_loses_no_client_at_the_ends() -> None:
    grid = np.linspace(0, 100, 1001)
    accuracy = np.array([[0, 0, 100, 50, np.nan]], dtype=np.float32)
    density = spread.density_of(accuracy, grid) / (spread.SMOOTHING * np.sqrt(2 * np.pi))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    assert density[grid < 20].sum() == pytest.approx(2 * density[grid > 80].sum(), rel=0.01)


def clients_drawn(directory: Path) -> set[str]:
    spec = figures(read_record(directory))["clients"]
    rows = spec["datasets"][spec["data"]["name"]]
    return {row["client"] for row in rows}


def test_clients_are_shown_by_name_where_names_are_known(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg", "adafedadam"])
    numbered = clients_drawn(tmp_path)
    assert numbered == {str(k) for k in range(1, 12)}  # the first has no test samples
    arrays = load_file(tmp_path / "clients.safetensors")
    names = [f"writer <{k}>" for k in range(len(arrays["train_size"]))]
    save_file(arrays, tmp_path / "clients.safetensors", metadata={"names": json.dumps(names)})
    assert clients_drawn(tmp_path) == {f"writer <{k}>" for k in numbered}
    assert "writer \\u003c1>" in html_of(tmp_path)


def test_a_tie_is_called_one(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"])
    for row in results["summary"]:
        row["worst30"]["mean"] = 12.0
    results["summary"][1]["avg"]["mean"] = results["summary"][0]["avg"]["mean"] + 3
    said = finding(results)
    assert said.startswith(
        "FedAvg and AdaFedAdam serve the worst-off 30 % of clients equally well: accuracy of 12.0 %"
    )
    assert said.endswith("is AdaFedAdam’s.")
