"""A comparison grows to the results of one call, and stops when a time budget or a callback asks for it."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fairwind
from fairwind.errors import InputError
from fairwind.runs import growth
from fairwind.runs.duration import seconds_of
from fairwind.runs.files import GROWING, RESULTS, write_atomic
from forked import bits, strays
from own_algorithms import built

# Of each type: sum, local, memory, gradient, personal, cohort and gram
ALGORITHMS = (
    *("fedavg", "adafedadam", "fedprox", "scaled", "scaffold", "mimelite", "mime", "ditto"),
    *("worst_first", "afl", "by_angle", "fedmgda"),
)
SETUP = "synthetic:clients=8,features=5,classes=3"
SEEDS, ROUNDS = (0, 1), 8  # evaluated after rounds 0, 3, 6 and 8


def compare(
    out: Path | None, names: Sequence[str] = ALGORITHMS, setup: str = SETUP, **options: Any
) -> fairwind.Comparison:
    own = {name: name if name in fairwind.algorithms.REGISTRY else built(name) for name in names}
    given: dict[str, Any] = {
        "seeds": SEEDS,
        "rounds": ROUNDS,
        "eval_every": 3,
        "compile": "off",
        "participation": 0.7,
        "progress": False,
        "checkpoint_every": 0,
    }
    return fairwind.compare(fairwind.setup(setup), own, out=out, **given | options)


def found(path: Path) -> dict[str, Any]:
    """All that was found, to the bit; without the reasons of the plan, which tell what was given."""
    seen = bits(path)
    seen["results"]["plan"] = {part: each["value"] for part, each in seen["results"]["plan"].items()}
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What one call finds."""
    folder = tmp_path_factory.mktemp("whole")
    known: dict[str, dict[str, Any]] = {}

    def once(**options: Any) -> dict[str, Any]:
        key = repr(options)
        if key not in known:
            path = folder / str(len(known))
            compare(path, **options)
            known[key] = found(path)
        return known[key]

    return once


Whole = Callable[..., dict[str, Any]]
LOOP: dict[str, Any] = {"engine": "loop"}
FEW: dict[str, Any] = {"names": ("fedavg", "scaffold", "ditto")}


@pytest.mark.parametrize("options", [{}, LOOP], ids=["stacked", "loop"])
def test_more_rounds_give_the_bits_of_one_call(options: dict[str, Any], whole: Whole, tmp_path: Path) -> None:
    compare(tmp_path / "run", rounds=4, **options)
    compare(tmp_path / "run", rounds=5, **options)
    compare(tmp_path / "run", **options)
    assert found(tmp_path / "run") == whole(**options)
    assert [line["round"] for line in fairwind.load(tmp_path / "run")[0].history] == [0, 3, 6, 8]
    assert not (tmp_path / "run" / GROWING).exists()
    assert strays(tmp_path) == []


@pytest.mark.parametrize(
    "before",
    [
        {"seeds": [1]},
        {"names": ALGORITHMS[1::2]},
        {"names": ALGORITHMS[::-2], "seeds": [1], "rounds": 4},
    ],
    ids=["seeds", "algorithms", "all three"],
)
def test_more_runs_give_the_bits_of_one_call_in_the_loop(
    before: dict[str, Any], whole: Whole, tmp_path: Path
) -> None:
    compare(tmp_path / "run", **before, **LOOP)
    compare(tmp_path / "run", **LOOP)
    assert found(tmp_path / "run") == whole(**LOOP)


def test_what_a_codec_left_out_is_grown_and_resumed_too(whole: Whole, tmp_path: Path) -> None:
    coded: dict[str, Any] = {"codec": "int8", "names": ("fedavg", "ditto", "afl"), **LOOP}
    compare(tmp_path / "run", **coded | {"names": ("ditto",), "seeds": [1], "rounds": 4})
    compare(tmp_path / "run", **coded)
    assert found(tmp_path / "run") == whole(**coded)


def test_more_stacked_runs_are_those_of_one_call_up_to_rounding(tmp_path: Path) -> None:
    """The order of additions in a product of matrices depends on what is stacked."""
    together, first = compare(None), compare(tmp_path / "run", names=ALGORITHMS[1::2], seeds=[1])
    grown = compare(tmp_path / "run")
    assert [(run.algorithm, run.seed) for run in grown] == [(run.algorithm, run.seed) for run in together]
    for run in grown:
        one = together[run.algorithm, run.seed]
        for name, value in run.state_dict.items():
            torch.testing.assert_close(value, one.state_dict[name], rtol=1e-4, atol=1e-5)
    for run in first:  # what was there stays as it was
        same = grown[run.algorithm, run.seed]
        assert (run.history, run.metrics) == (same.history, same.metrics)
        assert all(torch.equal(value, same.state_dict[name]) for name, value in run.state_dict.items())


def test_only_what_is_missing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairwind.engine.simulation import Simulation

    compare(tmp_path / "run", names=["fedavg"], seeds=[0], rounds=6)
    trained: list[tuple[int, list[tuple[str, int]]]] = []
    step = Simulation.step

    def counted(made: Simulation) -> None:
        trained.append((made.round, [(run.label, run.seed) for run in made.runs]))
        step(made)

    monkeypatch.setattr(Simulation, "step", counted)
    compare(tmp_path / "run", names=["fedavg", "fedadam"], seeds=[0, 1], rounds=7)
    new = [("fedavg", 1), ("fedadam", 0), ("fedadam", 1)]
    assert trained == [*((t, new) for t in range(6)), (6, [("fedavg", 0), *new])]


def test_the_order_that_is_asked_for_is_that_of_the_results(whole: Whole, tmp_path: Path) -> None:
    compare(tmp_path / "run", names=["ditto", "fedavg"], seeds=[1, 0], **LOOP)
    compare(tmp_path / "run", **FEW, **LOOP)
    assert found(tmp_path / "run") == whole(**FEW, **LOOP)


def solver(lr: float, **options: Any) -> fairwind.Solver:
    return fairwind.Solver(lr=lr, batch_size=10, **options)


TWO: dict[str, Any] = {"names": ("fedavg", "scaffold"), "rounds": 14, "patience": 1}


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"setup": f"{SETUP},validation=0.2"}, 8),
        ({"solver": solver(1e30)}, 8),
        ({"solver": solver(0.1, lr_decay=0.9)}, 8),
        ({"target": 47.0}, 6),  # seed 1 alone stops after round 3
        (TWO | {"solver": solver(0.3)}, 9),
        (TWO | {"solver": solver(1.0)}, 14),  # seed 1 alone stops after round 9
    ],
    ids=["validation", "diverged", "decay", "target", "patience", "patience of one seed"],
)
@pytest.mark.parametrize("before", [{"rounds": 4}, {"seeds": [1], "rounds": 4}, {"seeds": [1]}])
@pytest.mark.filterwarnings("ignore:.*being not finite")
def test_it_does_so_whatever_the_task_and_when_it_stops(
    options: dict[str, Any], last: int, before: dict[str, Any], whole: Whole, tmp_path: Path
) -> None:
    options = FEW | LOOP | options
    compare(tmp_path / "run", **options | before)
    compare(tmp_path / "run", **options)
    assert found(tmp_path / "run") == whole(**options)
    assert fairwind.load(tmp_path / "run")[0].rounds[-1] == last
    assert ("stopped" in whole(**options)["results"]) == (last < options.get("rounds", ROUNDS))


def stop_at(round: int) -> Callable[[list[dict[str, Any]]], None]:
    def stop(lines: list[dict[str, Any]]) -> None:
        if lines[0]["round"] == round:
            raise KeyboardInterrupt

    return stop


def test_an_unfinished_comparison_grows_too(whole: Whole, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "run", seeds=[1], rounds=7, after_evaluation=stop_at(6), **FEW, **LOOP)
    compare(tmp_path / "run", **FEW, **LOOP)
    assert found(tmp_path / "run") == whole(**FEW, **LOOP)


def test_until_it_has_grown_the_results_so_far_are_there(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairwind.engine.simulation import Simulation

    path, small = tmp_path / "run", {"seeds": [1], "rounds": 4, **FEW, **LOOP}
    compare(path, **small)
    before, step = found(path), Simulation.step
    for kills in (2, 3, 5, 7):  # while new runs train, then all of them

        def killed(made: Simulation, kills: int = kills) -> None:
            step(made)
            if made.round == kills:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "step", killed)
            with pytest.raises(KeyboardInterrupt):
                compare(path, **FEW, **LOOP)
        assert found(path) == before
        assert [run.seed for run in fairwind.load(path)] == [1, 1, 1, 1]
        compare(path, **small)  # loaded, and what has grown so far stays
        assert found(path) == before
        with pytest.raises(InputError, match=r"growing already.*'rounds', which was 8 and is 9.*or delete"):
            compare(path, rounds=9, **FEW, **LOOP)
    compare(path, **FEW, **LOOP)
    assert found(path) == whole(**FEW, **LOOP)


def test_a_kill_while_files_take_their_places_loses_nothing(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pristine, write = tmp_path / "pristine", write_atomic
    compare(pristine, rounds=4, **FEW)
    for at in range(0, 9, 2):
        path = tmp_path / f"run{at}"
        written: list[Path] = []
        shutil.copytree(pristine, path)

        def killed(file: Path, data: bytes, at: int = at, written: list[Path] = written) -> Path:
            if len(written) == at:
                raise KeyboardInterrupt
            written.append(file)
            return write(file, data)

        with monkeypatch.context() as patch:
            patch.setattr(growth, "write_atomic", killed)
            with pytest.raises(KeyboardInterrupt):
                compare(path, **FEW)
        assert len(fairwind.load(path)[0].history) == 4  # after rounds 0, 3, 6 and 8
        compare(path, **FEW)
        assert found(path) == whole(**FEW)
        assert not (path / GROWING).exists()
        assert len(list((path / "checkpoints").iterdir())) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"participation": 0.5}, "setting 'participation', which was 0.7 and is 0.5"),
        ({"solver": fairwind.Solver(lr=0.2)}, r"setting 'lr', which was 0\.01 and is 0\.2"),
        ({"target": 50}, r"setting 'target', which was None and is 50\.0"),
        ({"setup": f"{SETUP},seed=3"}, "differs in its task"),
        ({"rounds": 3}, r"holds more than is asked for \(4 rounds, not 3\)"),
        ({"seeds": [1, 2]}, r"holds more than is asked for \(seed 0\)"),
        ({"names": ["fedavg"], "seeds": [5]}, r"\(seeds 0, 1; algorithms scaffold, ditto\)"),
    ],
)
def test_what_it_cannot_grow_into_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    compare(tmp_path / "run", rounds=4, **FEW)
    before = found(tmp_path / "run")
    given = {"rounds": 9, "seeds": [0, 1, 2], **FEW} | changes
    with pytest.raises(InputError, match=words):
        compare(tmp_path / "run", **given)
    assert found(tmp_path / "run") == before
    assert not (tmp_path / "run" / GROWING).exists()


def test_what_was_never_trained_need_not_be(whole: Whole, tmp_path: Path) -> None:
    compare(tmp_path / "run", rounds=1000, time_budget=1e-9, **FEW)
    compare(tmp_path / "run", **FEW)
    assert found(tmp_path / "run") == whole(**FEW)


def test_another_algorithm_of_the_same_name_is_refused(tmp_path: Path) -> None:
    task = fairwind.setup(SETUP)
    given: dict[str, Any] = {"out": tmp_path / "run", "progress": False, "compile": "off"}
    fairwind.compare(task, {"mine": fairwind.algorithms.fedavg()}, rounds=2, **given)
    with pytest.raises(InputError, match="differs in its algorithm 'mine'"):
        fairwind.compare(task, {"mine": fairwind.algorithms.qfedavg()}, rounds=3, **given)
    two: dict[str, Any] = {"mine": fairwind.algorithms.fedavg(), "other": fairwind.algorithms.qfedavg()}
    assert len(fairwind.compare(task, two, rounds=3, **given)) == 2


def test_evaluations_stay_as_the_comparison_began_and_it_says_so(whole: Whole, tmp_path: Path) -> None:
    compare(tmp_path / "run", rounds=4, **FEW)
    with pytest.warns(UserWarning, match="eval_every stays 3, as the comparison began"):
        compare(tmp_path / "run", eval_every=2, **FEW)
    assert found(tmp_path / "run") == whole(**FEW)


def test_a_schedule_that_depends_on_the_rounds_is_refused(tmp_path: Path) -> None:
    def train(rounds: int, schedule: Callable[[int], float]) -> fairwind.Comparison:
        solver = fairwind.Solver(lr=0.1, lr_schedule=schedule)
        return compare(tmp_path / "run", rounds=rounds, solver=solver, **FEW)

    def cosine(rounds: int) -> Callable[[int], float]:
        return lambda t: 0.5 * (1 + math.cos(math.pi * t / rounds))

    train(4, cosine(4))
    with pytest.raises(InputError, match=r"its lr_schedule, which gave 0\.85\d* for round 1 and gives 0\.96"):
        train(8, cosine(8))
    shutil.rmtree(tmp_path / "run")
    train(4, cosine(20))
    grown = train(8, cosine(20))
    shutil.rmtree(tmp_path / "run")
    once = train(8, cosine(20))
    for one, other in zip(grown, once, strict=True):
        assert all(torch.equal(value, other.state_dict[n]) for n, value in one.state_dict.items())


def test_a_damaged_checkpoint_costs_rounds_but_no_bits(whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "run"
    compare(path, rounds=4, seeds=[1], **FEW, **LOOP)
    last = path / "checkpoints" / "0000004.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="checkpoint 0000004 is refused: .* an earlier one is used"):
        compare(path, **FEW, **LOOP)
    assert found(path) == whole(**FEW, **LOOP)


def test_without_a_checkpoint_one_line_says_what_to_do(whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "run"
    compare(path, rounds=4, seeds=[1], **FEW, **LOOP)
    for file in (path / "checkpoints").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InputError, match=r"no usable checkpoint .* delete that folder to start again"):
        compare(path, **FEW, **LOOP)
    assert len(fairwind.load(path)) == 4
    shutil.rmtree(path / "checkpoints")
    compare(path, **FEW, **LOOP)
    assert found(path) == whole(**FEW, **LOOP)


# ---- a time budget, and a callback that stops ----


def test_a_time_budget_stops_after_the_round_and_more_time_goes_on(whole: Whole, tmp_path: Path) -> None:
    path, options = tmp_path / "run", FEW
    stopped = compare(path, time_budget=1e-9, **options)
    assert stopped.results["stopped"] == {"by": "time_budget", "why": "the time budget was used up"}
    assert stopped[0].rounds == [0, 1]  # evaluated where it stopped
    assert dict(stopped.results["config"])["rounds"] == ROUNDS
    assert "Training stopped after round 1 of 8" in stopped.report().read_text()
    before = found(path)
    assert compare(path, time_budget=1e-9, **options).results["stopped"]["by"] == "time_budget"  # loaded
    assert found(path) == before
    spent = stopped.results["timing"]["seconds"]
    assert compare(path, time_budget=2 * spent, **options).results["runs"][0]["rounds"] in range(
        2, ROUNDS + 1
    )
    compare(path, time_budget="1h", **options)
    assert found(path) == whole(**options)
    assert "stopped" not in fairwind.load(path).results


def test_a_run_that_time_stopped_gets_seeds_and_then_its_rounds(whole: Whole, tmp_path: Path) -> None:
    path, options = tmp_path / "run", FEW | LOOP
    compare(path, time_budget=1e-9, seeds=[1], **options)
    with pytest.raises(InputError, match=r"time budget .* the new runs were at round 1"):
        fairwind_compare_from_three_rounds(path, options)
    compare(path, **options)
    assert found(path) == whole(**options)


def fairwind_compare_from_three_rounds(path: Path, options: dict[str, Any]) -> None:
    """Goes on to round 4, then asks for another seed in no time."""
    shutil.rmtree(path)
    compare(path, rounds=4, seeds=[1], **options)
    compare(path, time_budget=1e-9, **options)


def test_what_time_stopped_is_made_again_as_it_was(tmp_path: Path) -> None:
    compare(tmp_path / "run", time_budget=1e-9, **FEW)
    before = found(tmp_path / "run")
    (tmp_path / "run" / "models.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged, and made again: models"):
        compare(tmp_path / "run", **FEW)
    assert found(tmp_path / "run") == before


@pytest.mark.parametrize("answer", [True, np.True_])
def test_a_callback_stops_by_returning_true(answer: object, whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def enough(lines: list[dict[str, Any]]) -> object:
        return answer if lines[0]["round"] == 3 else None

    stopped = compare(path, after_evaluation=enough, **FEW)
    assert stopped.results["stopped"]["by"] == "after_evaluation"
    assert stopped[0].rounds == [0, 3]
    assert "(after_evaluation) was decided on the test samples" in stopped.results["parts"]["note"]
    before = found(path)
    compare(path, after_evaluation=enough, **FEW)  # asked again, says the same
    assert found(path) == before
    compare(path, after_evaluation=lambda lines: "anything else", **FEW)
    assert found(path) == whole(**FEW)


def test_a_callback_at_the_last_round_stops_nothing() -> None:
    done = compare(None, names=["fedavg"], after_evaluation=lambda lines: lines[0]["round"] == ROUNDS)
    assert "stopped" not in done.results


@pytest.mark.parametrize(
    ("given", "seconds"), [(90, 90), ("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5 h", 5400)]
)
def test_times_are_seconds_or_words(given: float | str, seconds: float) -> None:
    assert seconds_of(given, "time_budget") == seconds


@pytest.mark.parametrize("given", [0, -1, "", "m", "10 minutes", "1h30", math.nan, math.inf, True, None, [1]])
def test_what_is_no_time_is_refused(given: Any) -> None:
    with pytest.raises(
        InputError, match=r"time_budget=.* is not a time: give seconds, or a text such as '10m'"
    ):
        seconds_of(given, "time_budget")


def test_results_of_a_target_say_why_they_stopped(tmp_path: Path) -> None:
    compare(tmp_path / "run", target=1.5, **FEW)
    results = json.loads((tmp_path / "run" / RESULTS).read_bytes())
    assert results["stopped"] == {"by": "target", "why": "every average has reached 1.5"}
