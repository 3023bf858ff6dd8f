"""The report says what the run directory holds, to everybody, without asking the network for anything."""

import base64
import dataclasses
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file, save_file

from fairwind.data.federation import Federation
from fairwind.intervals import paired_differences
from fairwind.report import charts, clients, spread, summary_table, write_report
from fairwind.report.finding import best_shown, finding
from fairwind.report.page import figures, page
from fairwind.report.paired import paired
from fairwind.report.record import read_record
from fairwind.report.table import MEASURES, display_name, measures
from fairwind.report.theme import PALETTE, styles, theme
from fairwind.runs.results import commonest_answer
from fairwind.runs.schema import Findings
from made_up import save_results, write_run
from narrowed import known
from reader import Reader

KEYS = [measure.key for measure in MEASURES]
HOSTILE = "</script><script>alert('x')</script>\"&[bold]"


def html_of(directory: Path) -> str:
    record = read_record(directory)
    return page(record, figures(record))


def printed(results: dict[str, Any], directory: Path | None = None) -> str:
    """The terminal's table, with what is bold where the directory is given."""
    out = StringIO()
    record = None if directory is None else read_record(directory)
    ahead = {} if record is None else best_shown(record, paired(record))
    table = summary_table(cast(Findings, results), ahead)
    Console(file=out, width=80, color_system="standard", force_terminal=True).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("kind", "average"),
    [("accuracy", 100.0), *(("lower", value) for value in (12345.6, 1.5e12, 98765.4, 3.27, 0.0123, 1e-7))],
)
def test_no_number_and_no_name_is_cut(average: float, kind: str, grouped: bool, width: int) -> None:
    keys = ("avg", "std", "worst30", "worst", "avg_weighted", "worst_group_avg", "group_gap")
    labels = ["fedavg", "adafedadam:alpha=2,warmup=0", "mine"]
    value = {"mean": average, "std": average * 0.123}
    groups = {"groups": {"north": {"clients": 2, "avg": value}}} if grouped else {}
    rows = [{"algorithm": label} | dict.fromkeys(keys, value) | groups for label in labels]
    runs = [{"algorithm": a, "seed": s, "left_out": 0, "stalled_rounds": 0} for a in labels for s in (0, 1)]
    scores = [{"name": "rmse", "kind": kind}]
    results = cast(Findings, {"scores": scores, "summary": rows, "runs": runs})
    out = StringIO()
    Console(file=out, width=width).print(summary_table(results, width=width))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    mean, spread = map(measures(results)[0].text, value.values())
    assert float(mean) == pytest.approx(average, rel=0.01)
    assert shown.count(mean) == shown.count(f"±{spread}") == 5 * len(labels)
    for word in ("FedAvg", "AdaFedAdam", "alpha=2", "warmup=0", "mine", "worst 30 %"):
        assert word in shown


def finding_of(directory: Path) -> str:
    record = read_record(directory)
    return finding(record, paired(record))


def test_an_algorithm_is_compared_with_others_and_not_with_its_further_models(tmp_path: Path) -> None:
    """Of two algorithms with fine-tuned models there are two, however many models there are."""
    models = {"fedavg": 70.0, "ditto": 60.0, "ditto (personal)": 79.0, "fedavg (fine-tuned)": 80.0}
    write_run(tmp_path, list(models), level=models, noise=0.1)
    said = finding_of(tmp_path)
    assert "FedAvg (fine-tuned) serves the worst-off 30 % of clients best" in said
    assert "ahead of Ditto (personal), the next best" in said
    assert "FedAvg," not in said
    html = html_of(tmp_path)
    assert "2 algorithms on" in html
    assert "2 algorithms × 3 seeds" in html

    alone = {"fedavg": 70.0, "fedavg (fine-tuned)": 80.0}
    write_run(tmp_path, list(alone), level=alone, noise=0.1)
    assert finding_of(tmp_path).startswith("Under FedAvg (fine-tuned) clients reach")
    assert "1 algorithm × 3 seeds" in html_of(tmp_path)


ALGORITHMS = ["adafedadam", "fedavg", "q-fedavg:q=0.1", "adafedadam:alpha=2,eps=1e-8"]
LEVELS = {"adafedadam": 60.0, "fedavg": 70.0, "q-fedavg:q=0.1": 50.0, "adafedadam:alpha=2,eps=1e-8": 30.0}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    directory = tmp_path_factory.mktemp("run")
    results = write_run(directory, ALGORITHMS, level=LEVELS)
    results["summary"][1]["std"] = {"mean": None, "std": None}
    results["summary"][0]["worst30"]["mean"] = None
    results["runs"][4]["left_out"] = 3
    save_results(directory, results)
    return directory, write_report(directory)


def test_every_figure_is_a_pdf_and_a_png_and_nothing_is_left_behind(report: tuple[Path, list[Path]]) -> None:
    directory, written = report
    names = ["average", "certainty", "clients", "distribution", "sizes", "worst30"]
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
    first_cells = [row[0][0] for row in Reader(html).rows[:10]]
    assert first_cells == ["", *names] * 2
    assert names == [display_name(label) for label in ALGORITHMS]


def test_numbers_on_the_page_are_those_of_the_summary(report: tuple[Path, list[Path]]) -> None:
    directory = report[0]
    summary = json.loads((directory / "results.json").read_text())["summary"]
    rows = Reader((directory / "report.html").read_text(encoding="utf-8")).rows
    tables = [rows[:5], rows[5:10]]
    columns = [(table, column) for table in tables for column in range(1, len(table[0]))]
    for key, (table, column) in zip(KEYS, columns, strict=True):
        for row, line in zip(table[1:], summary, strict=True):
            text, mean = row[column][0].split()[0], line[key]["mean"]
            assert text == "–" if mean is None else float(text) == pytest.approx(mean, abs=0.005)


def bold_cells(directory: Path) -> dict[str, list[str]]:
    """By algorithm, the measures that are bold on the page."""
    rows = Reader(html_of(directory).replace("\u00a0", " ")).rows
    count = 1 + len(json.loads((directory / "results.json").read_text())["summary"])
    found: dict[str, list[str]] = {}
    for table in (rows[:count], rows[count : 2 * count]):
        for name, *cells in table[1:]:
            bold = [head for (head, _), (_, is_bold) in zip(table[0][1:], cells, strict=True) if is_bold]
            found.setdefault(name[0], []).extend(bold)
    return found


def test_what_is_bold_is_ahead_of_every_other_one(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg", "adafedadam", "fednova"], level={"adafedadam": 70, "fednova": 60.0})
    bold = bold_cells(tmp_path)
    assert {"average", "worst 30 %", "best 30 %", "weighted average"} <= set(bold["FedAvg"])
    assert "worst" not in bold["FedAvg"]  # one client is no sample
    assert "loss" in bold["FedNova"]
    assert "average" not in bold["AdaFedAdam"] + bold["FedNova"]


def test_within_noise_nothing_is_bold(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], level={"adafedadam": 80.3}, noise=4.0)
    averages = [row["avg"]["mean"] for row in results["summary"]]
    assert f"{averages[0]:.2f}" != f"{averages[1]:.2f}"
    bold = bold_cells(tmp_path)
    assert not {"average", "worst 30 %", "STD"} & {*bold["FedAvg"], *bold["AdaFedAdam"]}
    assert finding_of(tmp_path).count("No difference shown") == 2


def test_a_tie_as_printed_is_not_bold(tmp_path: Path) -> None:
    level = {"adafedadam": 80.001}
    write_run(tmp_path, ["fedavg", "adafedadam"], level=level, noise=0.0)  # always ahead, by nothing
    bold = bold_cells(tmp_path)
    assert not {"average", "worst 30 %", "STD"} & {*bold["FedAvg"], *bold["AdaFedAdam"]}


def test_at_chance_level_nothing_is_celebrated(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], level={"fedavg": 20, "adafedadam": 25})
    assert "serves the worst-off" in finding_of(tmp_path)
    results["federation"] |= {"classes": 4, "commonest": 26.0}
    save_results(tmp_path, results)
    said = finding_of(tmp_path)
    assert said.startswith("Not shown to be better than always giving the commonest answer: the best average")
    assert "against 26.0 %" in said
    assert bold_cells(tmp_path) == {"FedAvg": [], "AdaFedAdam": []}
    assert not re.search(r"\x1b\[1m[\d.]+\x1b", printed(results, tmp_path))


def test_bold_in_the_terminal_is_as_on_the_page(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], level={"adafedadam": 70})
    bold = re.findall(r"\x1b\[1m([\d.]+)\x1b", printed(results, tmp_path))
    of_page = [name for name in bold_cells(tmp_path)["FedAvg"] if name != "best 30 %"]
    assert [f"{results['summary'][0][key]['mean']:.2f}" for key in ("avg", "worst30", "avg_weighted")] == bold
    assert {"average", "worst 30 %", "weighted average"} <= set(of_page)


def test_redrawing_agrees_with_the_metrics_and_their_intervals(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], clients=40, level={"adafedadam": 82}, noise=6.0)
    record = read_record(tmp_path)
    found = paired(record)
    for r, run in enumerate(results["runs"]):
        for key, values in found.jackknife.values.items():
            assert values[0, r] == pytest.approx(run["final"][key], rel=1e-4), key
    theirs = paired_differences(*(record.score_of(label) for label in ("adafedadam", "fedavg")))
    for key, interval in theirs.items():
        mine = found.difference(key, "adafedadam", "fedavg")
        assert mine is not None
        assert mine == pytest.approx(interval, abs=1e-3)  # one procedure on the page and in Python


def test_the_terminal_table_fits_80_columns_without_breaking_a_number(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam:alpha=2,eps=1e-8", "fedavg", "fedadagrad"])
    lines = re.sub(r"\x1b\[[\d;]*m", "", printed(results)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(bool(re.fullmatch(r".*(\d+\.\d\d ±\d+\.\d\d\s+){5}", line + " ")) for line in lines) == 3


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
    assert "One seed says nothing of others." in Reader(html_of(tmp_path)).text


def test_one_seed_calls_no_algorithm_best(tmp_path: Path) -> None:
    write_run(tmp_path / "one", ["fedavg", "adafedadam"], seeds=1, level={"adafedadam": 60, "fedavg": 90})
    assert finding_of(tmp_path / "one").startswith("No difference shown for the worst-off 30 %")
    assert bold_cells(tmp_path / "one") == {"FedAvg": [], "AdaFedAdam": []}
    write_run(tmp_path / "three", ["fedavg", "adafedadam"], level={"adafedadam": 60, "fedavg": 90})
    assert finding_of(tmp_path / "three").startswith("FedAvg serves the worst-off 30 % of clients best")


def test_equal_averages_are_not_ranked_by_their_order(tmp_path: Path) -> None:
    for order in (["fedavg", "fedadam"], ["fedadam", "fedavg"]):
        results = write_run(tmp_path / order[0], order, level={"fedavg": 80, "fedadam": 80})
        for row in results["summary"]:
            row["avg"] = {"mean": 80.0, "std": 0.0}
        save_results(tmp_path / order[0], results)
        names = " and ".join("FedAvg" if name == "fedavg" else "FedAdam" for name in order)
        assert f"{names} share the best, 80.0 %." in finding_of(tmp_path / order[0])


def test_bands_reach_from_the_lowest_seed_to_the_highest(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg"])
    record = read_record(tmp_path)
    values = [known(row["avg"]) for row in record.history if row["round"] == 40]
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
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | dict.fromkeys([*KEYS, "certainty"])) for row in rows]
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    nothing = np.full((6, 12), np.nan, dtype=np.float32)
    sizes = np.zeros(12, dtype=np.int64)
    arrays: dict[str, np.ndarray] = {
        "score": nothing,
        "loss": nothing,
        "train_size": sizes,
        "test_size": sizes,
    }
    save_file(arrays, tmp_path / "clients.safetensors", metadata={"names": json.dumps(list("abcdefghijkl"))})
    save_results(tmp_path, results)
    write_report(tmp_path)
    seen = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No run ended with a defined accuracy." in seen.text
    assert not any(bold for row in seen.rows for _, bold in row)


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (
            {"adafedadam": 90, "fedavg": 80},
            ["AdaFedAdam serves the worst-off 30 % of clients best", "ahead of FedAvg, the next best (95 %"],
        ),
        ({"fedavg": 80, "adafedadam": 60}, ["FedAvg serves", "Its average over all clients", "best too"]),
        ({"fedavg": 80, "adafedadam": 80.2}, ["No difference shown for the worst-off", "in the average"]),
    ],
)
def test_the_finding_follows_the_numbers(level: dict[str, float], said: list[str], tmp_path: Path) -> None:
    write_run(tmp_path, ["adafedadam", "fedavg"], level=level, noise=2.0)
    sentence = finding_of(tmp_path)
    assert all(words in sentence for words in said), sentence


def test_the_headline_carries_the_interval_of_the_difference(tmp_path: Path) -> None:
    write_run(tmp_path, ["adafedadam", "fedavg"], level={"adafedadam": 90.0})
    found = paired(read_record(tmp_path)).difference("worst30", "adafedadam", "fedavg")
    assert found is not None
    assert f"(95 % interval {found.low:.1f} to {found.high:.1f})" in finding_of(tmp_path)


def test_one_algorithm_alone_is_not_called_best(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg"])
    said = finding_of(tmp_path)
    assert said.startswith("Under FedAvg clients reach accuracy of")
    assert "95 % interval" in said
    assert "best" not in said
    assert 'class="legend"' not in html_of(tmp_path)


def test_where_lower_is_better_the_lowest_leads(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], level={"adafedadam": 60})
    results["scores"] = [{"name": "mae", "kind": "lower"}]
    for row in results["summary"]:  # of the highest values instead of the lowest
        row["worst30"], row["best30"] = row["best30"], row["worst30"]
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    for line in lines:
        line["avg"] += 100 * (line["round"] == 0)
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_results(tmp_path, results)
    said = finding_of(tmp_path)
    assert said.startswith("AdaFedAdam serves the worst-off 30 % of clients best: MAE of")
    assert "average" in bold_cells(tmp_path)["AdaFedAdam"]
    rows = spread.sorted_scores(read_record(tmp_path), "fedavg")
    assert known(rows[0]["score"]) > known(rows[-1]["score"])  # the worst-off on the left


def test_of_thousands_of_clients_a_sample_is_shown_from_worst_to_best(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg", "fedadam"], clients=3500, level={"fedavg": 60.0})
    record = read_record(tmp_path)
    means = np.nanmean(record.score[:, 1:], axis=0)
    shown = spread.shown_clients(record)
    assert len(shown) == len(set(shown.tolist())) == spread.MAX_CLIENTS
    assert (shown[0], shown[-1]) == (1 + means.argmin(), 1 + means.argmax())
    html = html_of(tmp_path)
    assert "Of 3,499 clients 300 have a column" in html
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


def test_sorted_scores_rise_and_end_at_the_worst_and_the_best(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg"], clients=1000)
    record = read_record(tmp_path)
    rows = spread.sorted_scores(record, "fedavg")
    scores = [known(row["score"]) for row in rows]
    assert len(rows) == spread.MAX_PLACES
    assert scores == sorted(scores)
    assert (rows[0]["share"], rows[-1]["share"]) == (0, 100)
    assert scores[0] == pytest.approx(np.nanmin(record.score, axis=1).mean(), rel=1e-3)
    assert scores[-1] == pytest.approx(np.nanmax(record.score, axis=1).mean(), rel=1e-3)


def data_of(html: str) -> dict[str, Any]:
    """What the page's script is given."""
    found: dict[str, Any] = json.loads(re.search(r"^const page = (.*);$", html, re.M)[1])  # type: ignore[index]
    return found


def test_a_clients_curves_are_on_the_page_as_they_were_kept(tmp_path: Path) -> None:
    write_run(tmp_path, ["fedavg", "adafedadam"])
    kept = data_of(html_of(tmp_path))["clients"]["curves"]
    steps = np.frombuffer(base64.b64decode(kept["data"]), "<u2").reshape(2, len(kept["rounds"]), -1)
    values = kept["low"] + steps / kept["steps"] * (kept["high"] - kept["low"])
    curves = load_file(tmp_path / "clients.safetensors")["curves"][:, :, 1:]  # the first is not tested
    assert (kept["rounds"], kept["clients"]) == ([0, 10, 20, 30, 40], list(range(1, 12)))
    assert values[1] == pytest.approx(curves[:, 3:].mean(axis=1), abs=0.01)


def test_of_many_clients_some_curves_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    labels = [f"fedavg:lr={i}" for i in range(1, 25)]
    write_run(tmp_path, labels, clients=3500, seeds=1)
    html = html_of(tmp_path)
    kept = data_of(html)["clients"]["curves"]
    assert len(kept["clients"]) * 24 * 5 <= clients.MAX_VALUES
    assert f"room for the curves of {len(kept['clients']):,} of 3,499 clients" in html
    assert len(html) < 4_000_000


def test_the_target_table_has_the_first_round_at_it_and_its_seconds(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["fedavg", "adafedadam"], level={"adafedadam": 40}, noise=0.0)
    results["config"]["target"] = 45
    save_results(tmp_path, results)
    rows = {row[0][0]: [cell for cell, _ in row[1:]] for row in Reader(html_of(tmp_path)).rows[7:9]}
    record = read_record(tmp_path)
    reached = next(line["round"] for line in record.history if known(line["avg"]) >= 45)
    assert rows == {"FedAvg": [f"{reached}", f"{2 * reached}"], "AdaFedAdam": ["–", "–"]}


def test_the_page_says_how_to_run_it_again(tmp_path: Path) -> None:
    results = write_run(tmp_path, ["adafedadam:alpha=2", "mine"])
    results |= {"command": "fairwind compare synthetic --seeds 0 1 2", "data": "abc123"}
    save_results(tmp_path, results)
    recipe = {"algorithm_digests": {"mine": "d1d2"}, "model": "e5e6"}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    text = Reader(html_of(tmp_path)).text
    for words in ("fairwind compare synthetic --seeds 0 1 2", "0, 1, 2", "abc123", "e5e6", "d1d2"):
        assert words in text
    assert "alpha = 2.0, size = 1.0, lr = 0.001" in text  # defaults are spelt out


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
    write_run(tmp_path, ["fedavg", "adafedadam"], noise=0.0)
    said = finding_of(tmp_path)
    assert said.startswith(
        "No difference shown for the worst-off 30 % of clients: FedAvg and AdaFedAdam serve them equally"
    )


def test_the_commonest_answer_counts_every_client_alike() -> None:
    many, few = torch.zeros(80, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    clients = {
        str(k): {"train": (torch.randn(1, 2), y[:1]), "test": (torch.randn(len(y), 2), y)}
        for k, y in enumerate([many, few, few])
    }
    federation = Federation.from_clients(clients)
    assert commonest_answer(federation) == pytest.approx(100 * 2 / 3)  # class 1, of two clients out of three
    assert commonest_answer(dataclasses.replace(federation, classes=None)) is None
