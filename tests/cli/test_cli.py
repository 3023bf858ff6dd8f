"""The commands, as a user types them."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command import ENV, called, fairwind, lines, wait_for
from conftest import compiler_found
from fairwind import __version__ as fairwind_version
from fairwind import algorithms
from fairwind.cli import COMMANDS

QUICK = ["--compile", "off", "--checkpoint-every", "0", "--eval-every", "2"]
SMALL = "synthetic:clients=12,features=5,classes=3"


def start(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fairwind", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENV)


def numbers(directory: Path) -> dict[str, Any]:
    """All that a comparison found, without when and how fast."""
    results = json.loads((directory / "results.json").read_text())
    files = [load_file(directory / f"{name}.safetensors") for name in ("clients", "models")]
    return {
        "runs": results["runs"],
        "summary": results["summary"],
        "history": (directory / "history.jsonl").read_text(),
        "tensors": [{k: v.numpy().tobytes() for k, v in sorted(f.items())} for f in files],
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "run"
    done = fairwind("compare", SMALL, "--rounds", "30", "--out", directory, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "AdaFedAdam" in done.stdout
    assert str(directory / "report.html") in done.stdout
    return directory


def test_compare_writes_what_it_promises(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert set(results) >= {"setup", "config", "environment", "runs", "summary", "timing"}
    assert results["setup"] == SMALL
    names = ["fedavg", "fedadam", "fednova", "qfedavg", "adafedadam"]
    assert [(r["algorithm"], r["seed"]) for r in results["runs"]] == [
        (n, s) for n in names for s in (0, 1, 2)
    ]
    keys = "avg std worst30 best30 worst avg_weighted std_weighted rsd_error jain gini"
    for run in results["runs"]:
        assert run["rounds"] == 30
        assert set(keys.split()) <= set(run["final"])
        assert 0 <= run["final"]["worst"] <= run["final"]["avg"] <= 100
    assert [s["algorithm"] for s in results["summary"]] == names
    assert set(results["summary"][0]["worst30"]) == {"mean", "std"}
    assert {"seconds", "rounds_per_second", "client_steps_per_second"} <= set(results["timing"])
    assert results["config"]["solver"]["lr"] == 0.01

    lines = [json.loads(line) for line in (finished / "history.jsonl").read_text().splitlines()]
    assert len(lines) == 15 * 16
    assert {line["round"] for line in lines} == set(range(0, 31, 2))
    assert all(
        ("certainty" in line) == (line["algorithm"] == "adafedadam" and line["round"] > 0) for line in lines
    )

    clients = load_file(finished / "clients.safetensors")
    assert clients["score"].shape == clients["loss"].shape == (15, 12)
    assert clients["curves"].shape == (16, 15, 12)
    mean = clients["score"][0].double().nanmean().item()
    assert mean == pytest.approx(results["runs"][0]["final"]["avg"], abs=1e-4)
    assert load_file(finished / "models.safetensors")["adafedadam/2/weight"].shape == (3, 5)
    assert (finished / "report.html").stat().st_size > 100_000
    assert {p.suffix for p in (finished / "figures").iterdir()} == {".pdf", ".png"}


@pytest.mark.slow
def test_the_loop_finds_the_same(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "loop"
    names = "--algorithms", "fedavg", "adafedadam"
    done = fairwind("compare", SMALL, "--rounds", "30", "--engine", "loop", "--out", out, *QUICK, *names)
    assert done.returncode == 0, done.stderr
    stacked, loop = (load_file(d / "models.safetensors") for d in (finished, out))
    assert loop
    torch.testing.assert_close({name: stacked[name] for name in loop}, loop, rtol=1e-3, atol=1e-4)


def test_a_finished_run_is_not_trained_again(finished: Path) -> None:
    before = numbers(finished)
    written = (finished / "results.json").stat().st_mtime_ns
    done = called("resume", finished)
    assert done.returncode == 0
    assert "nothing is left to train" in done.stderr
    assert numbers(finished) == before
    assert (finished / "results.json").stat().st_mtime_ns == written


def test_report_writes_the_page_anew(finished: Path) -> None:
    page = finished / "report.html"
    before = page.read_text()
    page.unlink()
    done = called("report", finished)
    assert done.returncode == 0
    assert "AdaFedAdam" in done.stdout
    assert page.read_text() == before


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(finished: Path, tmp_path: Path) -> None:
    """SIGKILL, again and again, each time somewhere else; the numbers must agree bit for bit."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn by seed {seed}")
    moments = random.Random(seed)
    out = tmp_path / "run"
    process = start("compare", SMALL, "--rounds", "30", "--out", out, *QUICK)
    kills = 0
    for _ in range(6):
        wait_for(lambda: (out / "recipe.json").exists(), process)
        time.sleep(moments.uniform(0, 1.5))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.communicate()
        process = start("resume", out, "--checkpoint-every", "0")
        # Importing takes seconds in which nothing happens; kill after training has begun again.
        written = stamp(out)
        wait_for(partial(is_past, out, written), process)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert kills >= 1
    assert numbers(out) == numbers(finished)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="needs a compiler")
def test_a_compiled_run_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    options = ["--rounds", "300", "--compile", "on", "--checkpoint-every", "0", "--participation", "0.5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fairwind("compare", SMALL, *options, "--out", whole).returncode == 0
    process = start("compare", SMALL, *options, "--out", killed)
    for _ in range(3):
        written = stamp(killed)
        wait_for(partial(is_past, killed, written), process)
        time.sleep(random.uniform(1, 5))
        process.kill()
        process.communicate()
        process = start("resume", killed, "--checkpoint-every", "0")
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert numbers(killed) == numbers(whole)


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = SMALL, "--rounds", "100000", "--out", out, "--compile", "off", "--algorithms", "fedavg"
    process = start("compare", *arguments)
    wait_for(lambda: (out / "history.jsonl").exists() and lines(out) > 9, process)
    done = fairwind("resume", out)
    process.kill()
    process.communicate()
    assert_refused(done, "another process is training in")


def stamp(out: Path) -> tuple[str, ...]:
    files = (p for p in out.glob("**/*.json*") if not p.name.endswith(".partial"))
    return tuple(sorted(f"{p.name} {p.stat().st_mtime_ns}" for p in files))


def is_past(out: Path, written: tuple[str, ...]) -> bool:
    return stamp(out) > written


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "run"
    arguments = SMALL, "--rounds", "100000", "--out", out, "--compile", "off", "--algorithms", "fedavg"
    process = start("compare", *arguments)
    wait_for(lambda: (out / "history.jsonl").exists() and lines(out) > 9, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fairwind resume {out}" in stderr
    assert "Traceback" not in stderr
    saved = json.loads(max((out / "checkpoints").glob("*.json")).read_text())
    assert 10 <= saved["round"] < 100000
    assert f"stopped after round {saved['round']}" in stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start("compare", SMALL, "--rounds", "30", "--out", out, *QUICK)
    wait_for(lambda: len(list(out.glob("checkpoints/*.json"))) == 2, process)
    process.kill()
    process.communicate()
    newest = max(out.glob("checkpoints/*.json")).with_suffix(".safetensors")
    newest.write_bytes(newest.read_bytes()[:-8] + b"garbage!")
    done = fairwind("resume", out)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest.stem} is refused" in done.stderr
    assert numbers(out) == numbers(finished)
    (out / "results.json").unlink()
    for path in out.glob("checkpoints/*.safetensors"):
        path.write_bytes(b"all of them")
    assert_refused(fairwind("resume", out), "no usable checkpoint")


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "sinthetic"], ["unknown setup 'sinthetic'", "did you mean 'synthetic'"]),
        (["compare", "synthetic:classs=5"], ["parameter of synthetic 'classs'", "did you mean 'classes'"]),
        (["compare", "synthetic:classes=five"], ["classes='five' is not a whole number"]),
        (["compare", "synthetic:sizes=big"], ["leaf or li"]),
        (["compare", "--algorithms", "fedavgg"], ["unknown algorithm 'fedavgg'", "did you mean 'fedavg'"]),
        (["compare", "--algorithms", "adafedadam:alfa=2"], ["'alfa'", "did you mean 'alpha'"]),
        (["compare", "--algorithms", "fedavg", "fedavg"], ["'fedavg' is given twice"]),
        (["compare", "--algorithms"], ["nothing to run"]),
        (["compare", "--alpha", "-1"], ["alpha=-1"]),
        (["compare", "--round", "3"], ["unknown option '--round'", "did you mean '--rounds'"]),
        (["compare", "--rounds", "0"], ["rounds=0"]),
        (["compare", "--setup", "synthetic"], ["unknown option '--setup'"]),
        (["compare", "--checkpoint-every", "nan"], ["checkpoint_every=nan"]),
        (["compare", "synthetic", "extra"], ["unexpected argument 'extra'"]),
        (
            ["compare", "--rounds", "ten"],
            ["--rounds: 'ten' is not a whole number", "compare --help"],
        ),
        (["compare", "--solver", "adagrad"], ["'adagrad'", "--solver", "nesterov"]),
        (["compare", "--rounds"], ["Missing value", "--rounds"]),
        (["resume"], ["DIR is missing; see 'fairwind resume --help'"]),
        (["data"], ["TASK is missing; see 'fairwind data --help'"]),
        (["compare", "--eval-every", "ten"], ["--eval-every: 'ten' is not a whole number"]),
        (["compare", "--participation", "half"], ["--participation: 'half' is not a number"]),
        (["compare", "--seeds", "0", "a"], ["--seeds: 'a' is not a whole number"]),
        (["compare", "--engine", "fast"], ["--engine: 'fast' is not one of 'auto', 'stacked', 'loop'"]),
        (["compare", "--checkpoint-every", "-1"], ["checkpoint_every=-1.0 is out of range"]),
        (["sweep", "no.toml", "--checkpoint-every", "-1"], ["checkpoint_every=-1.0 is out of range"]),
        (["paper", "alpha", "--checkpoint-every", "-1"], ["checkpoint_every=-1.0 is out of range"]),
        (["compare", "--learning-rate", "1"], ["did you mean '--lr'?"]),
        (["compare", "--local-epochs", "1"], ["did you mean '--epochs'?"]),
        (["compare", "--local-steps", "1"], ["did you mean '--steps'?"]),
        (["compare", "--steps", "1.5"], ["--steps: '1.5' is not one or two whole numbers"]),
        (["compare", "--steps", "5", "--epochs", "0.5"], ["epochs=0.5 and steps=5 are both given"]),
        (["compare", "--gpu", "0"], ["did you mean '--device'?"]),
        (["compare", "--algorithm", "fedavg"], ["did you mean '--algorithms'?"]),
        (["compare", "--algorithms", "Q-FedAvg"], ["did you mean 'qfedavg'?"]),
        (
            ["compare", "--algorithms", "fedavg:epochs=3"],
            ["setting of all runs: --epochs", "fairwind.Solver"],
        ),
        (["compare", "synthetic:batch_size=3"], ["setting of all runs: --batch-size", "fairwind.Solver"]),
        (["compare", "synthetic:num_rounds=3"], ["setting of all runs: --rounds"]),
        (["--verion"], ["unknown option '--verion': did you mean '--version'?"]),
        (["completion", "tcsh"], ["'tcsh' is not one of 'bash', 'zsh', 'fish'"]),
        (["compar"], ["unknown command 'compar'", "did you mean 'compare'"]),
        (["compare", "--participation", "101"], ["participation=101", "clients_per_round"]),
        (["compare", "--device", "abacus"], ["device 'abacus'"]),
        (["compare", "synthetic[/x]"], ["unknown setup 'synthetic[/x]'"]),
        (["compare", "--alpha", "2", "--algorithms", "fedavg"], ["--alpha is AdaFedAdam's"]),
        (["compare", "--out", "x" * 300], ["cannot write to", "name too long"]),
        (["resume", "nowhere"], ["nowhere holds no run"]),
        (["report", "nowhere"], ["nowhere holds no run"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    assert_refused(called(*arguments, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []  # and leaves nothing behind


@pytest.mark.parametrize("name", ["fedbn", "moon", "feddc"])
def test_an_algorithm_that_is_not_here_is_not_taken_for_another(name: str) -> None:
    """They share three letters with half of all algorithms."""
    said = called("compare", "--algorithms", name).stderr
    assert f"unknown algorithm {name!r}: known: fedavg" in said


@pytest.mark.parametrize("words", [["--help"], ["help"], *([name, "--help"] for name in COMMANDS)])
def test_help_reads_as_a_person_would_write_it(words: list[str]) -> None:
    done = called(*words)
    assert done.returncode == 0
    for ugly in ("None", "STR]", "...]", "(default: )", "default: False", "tuple"):
        assert ugly not in done.stdout
    text = [line.strip("│ ") for line in done.stdout.splitlines()]
    assert not [line for line in text if line in ("all); or your own task:", "hub's is downloaded.")]


def test_help_that_nobody_reads_is_no_error() -> None:
    words = f"{sys.executable} -m fairwind compare --help | true"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, env=ENV, check=False)
    assert done.stderr == ""


def test_help_and_version_by_other_names() -> None:
    assert called("help", "resume").stdout == called("resume", "--help").stdout
    assert called("-V").stdout == called("--version").stdout == f"fairwind {fairwind_version}\n"


TYPED = """
source ./script
COMP_WORDS=(fairwind {words}) COMP_CWORD={number}
_tyro_fairwind
printf '%s\\n' "${{COMPREPLY[@]}}"
[[ ${{#COMPREPLY[@]}} -eq 0 || -n "${{COMPREPLY[0]}}" ]]
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("comp", {"compare", "completion"}),
        ("compare --par", {"--participation"}),
        ("compare --engine st", {"stacked"}),
        ("compare --precision b", {"bf16"}),
        ("resume scr", set()),  # bash's own: names of files
    ],
)
def test_bash_completes_commands_options_and_choices(words: str, found: set[str], tmp_path: Path) -> None:
    script = called("completion", "bash").stdout
    assert "\ncomplete -o default -F _tyro_fairwind fairwind\n" in script
    (tmp_path / "script").write_text(script)
    typed = TYPED.format(words=words, number=len(words.split()))
    done = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found, done.stderr
    assert found or done.stdout == "\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell: str) -> None:
    assert "fairwind" in called("completion", shell).stdout


def test_nothing_is_overwritten(finished: Path, tmp_path: Path) -> None:
    before = numbers(finished)
    words = "compare", SMALL, "--out", finished
    assert_refused(called(*words, "--lr", "0.3"), "holds a run", "'lr', which was 0.01 and is 0.3")
    assert_refused(called(*words, "--rounds", "1"), "holds more than is asked for", "rounds, not 1")
    assert numbers(finished) == before
    (tmp_path / "thesis.txt").write_text("mine")
    assert_refused(called("compare", SMALL, "--out", tmp_path), "not empty")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_finished_comparison_grows_by_resume_and_by_compare_again(tmp_path: Path) -> None:
    small = ["compare", SMALL, "--algorithms", "fedavg", *QUICK, "--engine", "loop"]
    large = ["compare", SMALL, "--algorithms", "fedavg", "qfedavg", *QUICK, "--engine", "loop"]
    sizes = ["--seeds", "0,1", "--rounds", "5"]
    whole, one, other = (tmp_path / name for name in ("whole", "one", "other"))
    done = [called(*large, *sizes, "--out", whole)]
    for out in (one, other):
        done.append(called(*small, "--seeds", "1", "--rounds", "3", "--out", out))
    done.append(called("resume", one, "--rounds", "5", "--seeds", "0", "--algorithms", "qfedavg"))
    done.append(called(*large, "--seeds", "1,0", "--rounds", "5", "--out", other))
    assert [each.returncode for each in done] == [0] * 5, [each.stderr for each in done]
    assert "3 of the runs are new, and train first, to round 3 of the others" in done[-1].stderr
    assert "QFedAvg" in done[-2].stdout.replace("-", "").replace("q", "Q")
    for out in (one, other):
        rows = {(run["algorithm"], run["seed"]): run for run in numbers(out)["runs"]}
        assert rows == {(run["algorithm"], run["seed"]): run for run in numbers(whole)["runs"]}
    again = called("resume", one)
    assert "nothing is left to train" in again.stderr


def test_a_time_budget_is_said_and_resume_without_one_trains_the_rest(finished: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "run", ["compare", SMALL, "--rounds", "30", *QUICK, "--time-budget", "0.001s"]
    stopped, again = called(*words, "--out", out), called(*words, "--out", out)
    assert "stopped after round 1: the time budget was used up" in stopped.stderr
    assert "Training stopped after round 1 of 30: the time budget was used up." in stopped.stdout
    assert "nothing was trained: the time budget was used up" in again.stderr
    rest = called("resume", out)
    assert rest.returncode == 0, rest.stderr
    assert numbers(out) == numbers(finished)
    assert_refused(called("resume", out, "--time-budget", "soon"), "time_budget='soon' is not a time")


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(fairwind("compare", SMALL, "--out", tmp_path / "file" / "run"), "cannot write to")
    assert_refused(fairwind("compare", SMALL, "--out", tmp_path / "file"), "cannot write to")


def test_options_reach_the_recipe(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = "--rounds 2 --seeds 5 --alpha 3 --solver nesterov --epochs 1 3 --participation 0.5 --lr 0.1"
    names = "--algorithms adafedadam fedadam:corrected=false"
    done = called("compare", SMALL, *options.split(), *names.split(), "--out", out, *QUICK)
    assert done.returncode == 0, done.stderr
    recipe = json.loads((out / "recipe.json").read_text())
    specs = ["adafedadam:alpha=3", "fedadam:corrected=false"]
    assert recipe["algorithms"] == specs
    solver = recipe["settings"]["solver"]
    assert (solver["momentum"], solver["nesterov"], solver["lr"]) == (0.9, True, 0.1)
    assert (solver["epochs"], recipe["settings"]["participation"]) == ([1, 3], 0.5)
    results = json.loads((out / "results.json").read_text())
    history = [json.loads(line)["algorithm"] for line in (out / "history.jsonl").read_text().splitlines()]
    assert [r["algorithm"] for r in results["runs"]] == specs == history[:2]  # with parameters, alone or not


@pytest.mark.slow
def test_nobody_reading_the_messages_costs_no_results(tmp_path: Path) -> None:
    out = tmp_path / "run"
    reader, writer = os.pipe()
    os.close(reader)
    words = ["compare", SMALL, "--rounds", "20", "--out", str(out), "--algorithms", "fedavg", *QUICK]
    command = [sys.executable, "-m", "fairwind", *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=writer, env=ENV, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert (out / "results.json").exists()


def test_a_full_disk_under_the_messages_costs_no_results(tmp_path: Path) -> None:
    """Of the command, and of Python without rich; also those of a search."""
    script = (
        "import sys, fairwind; sys.modules['rich'] = None; given = {'rounds': 2, 'compile': 'off'};"
        f"task = fairwind.setup({SMALL + ',validation=0.2'!r});"
        "fairwind.tune(task, 'fedavg', trials=2, **given);"
        "fairwind.compare(task, 'fedavg', out=sys.argv[1], **given)"
    )
    words = ["compare", SMALL, "--rounds", "2", "--algorithms", "fedavg", *QUICK, "--out"]
    doors = {"command": ["-m", "fairwind", *words], "python": ["-c", script]}
    with open("/dev/full", "w") as full:
        for name, door in doors.items():
            command = [sys.executable, *door, str(tmp_path / name)]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, env=ENV, check=False)
            assert done.returncode == 0, name
            assert (tmp_path / name / "results.json").exists()


def test_a_drawing_library_that_lacks_memory_costs_no_results(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(out / "figures")
    limited = ["bash", "-c", 'ulimit -v 6000000; exec "$@"', "-", sys.executable, "-m", "fairwind"]
    done = subprocess.run(
        [*limited, "report", str(out)], capture_output=True, text=True, env=ENV, check=False
    )
    assert done.returncode == 2, done.stderr
    said = (
        rf"the report of {out} cannot be written: [\w.]+ cannot be drawn: .* memory.*; the results are safe"
    )
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert numbers(out) == numbers(finished)
    assert fairwind("report", out).returncode == 0
    assert {path.suffix for path in (out / "figures").iterdir()} == {".pdf", ".png"}


@pytest.mark.parametrize(
    ("words", "encoding"),
    [("list", "latin-1"), ("compare --help", "ascii:surrogateescape"), ("completion fish", "latin-1")],
)
def test_a_terminal_without_unicode_is_no_error(words: str, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fairwind", *words.split()],
        capture_output=True,
        env=ENV | {"PYTHONIOENCODING": encoding},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout.decode("latin-1") or "fairwind" in done.stdout.decode("latin-1")


def test_list_names_everything_with_its_source() -> None:
    done = fairwind("list")
    assert done.returncode == 0
    for word in ("synthetic", "adafedadam", "alpha=1.0", "warmup=6", "McMahan", "Reddi", "Ju, Zhang"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["", "compare", "resume", "report", "list"])
def test_help_explains_every_option(command: str) -> None:
    done = fairwind(*command.split(), "--help")
    assert done.returncode == 0
    if command == "compare":
        for option in (
            "--algorithms",
            "--seeds",
            "--rounds",
            "--alpha",
            "--solver",
            "--epochs",
            "--participation",
        ):
            assert option in done.stdout


def test_sets_of_algorithms_by_name() -> None:
    assert {*algorithms.FAIR, *algorithms.ACCELERATED, *algorithms.BASELINES, "fedavg"} == set(
        algorithms.REGISTRY
    )
    assert algorithms.with_sets(["fedavg", "paper"]) == (
        "fedavg",
        "fedadam",
        "fednova",
        "qfedavg",
        "adafedadam",
    )
    assert algorithms.with_sets(["fair", "qfedavg"]).count("qfedavg") == 1
    assert algorithms.with_sets(["all"]) == tuple(algorithms.REGISTRY)[:-2]
    shown = called("list")
    for name in algorithms.REGISTRY:
        assert name in shown.stdout
    assert "a vector that each client keeps" in shown.stdout


def test_a_command_starts_without_what_takes_seconds_to_load() -> None:
    slow = "torch._dynamo", "torch._inductor", "altair", "pandas", "pyarrow", "datasets"
    code = f"import sys, fairwind.cli; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
