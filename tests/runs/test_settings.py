"""A setting is declared once: whatever lists settings follows from its field."""

import inspect
import json
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import fairwind as fw
from conftest import make_model
from fairwind.cli.compare import Compare
from fairwind.cli.options import names
from fairwind.cli.study import Sweep
from fairwind.engine.settings import Options, names_of
from fairwind.engine.solver import option_names
from fairwind.runs.recipe import Recipe, on_the_same_machine, settings_of
from fairwind.study import RunKey

SETTINGS = [field.name for field in fields(fw.Settings)]
PLAIN = settings_of("synthetic")


def other(name: str) -> fw.Settings:
    """Settings of which one is not the setup's."""
    kind = get_type_hints(fw.Settings)[name]
    if get_origin(kind) is Literal:
        value: Any = get_args(kind)[1]
    else:
        own = {"solver": fw.Solver(lr=0.5), "device": "cuda:1", "participation": 0.5, "codec": "int8"}
        value = (own | {"attack": "signflip", "defence": "median"}).get(name, 7)
    return replace(PLAIN, **{name: value})


def recipe(settings: fw.Settings) -> Recipe:
    return Recipe("synthetic", ("fedavg",), (0,), settings)


def test_every_setting_is_a_keyword_in_python() -> None:
    typed, declared = get_type_hints(Options), get_type_hints(fw.Settings)
    assert list(typed) == SETTINGS
    tasks_own = {name: declared[name] | None for name in ("rounds", "solver")}
    wider = {**declared, **tasks_own, "device": typed["device"]}  # also a torch.device
    assert typed == wider
    for function in (fw.compare, fw.simulate):
        shown = inspect.signature(function).parameters
        assert [name for name in shown if name in SETTINGS] == SETTINGS
        assert "options" not in shown
        plain = {name: getattr(fw.Settings(), name) for name in SETTINGS} | dict.fromkeys(tasks_own)
        assert {name: shown[name].default for name in SETTINGS} == plain


def test_every_setting_is_an_option_of_the_command_line() -> None:
    assert {f"--{name.replace('_', '-')}" for name in (*SETTINGS, *option_names())} <= set(names(Compare))
    machine = [f"--{name.replace('_', '-')}" for name in names_of("machine", "rounding")]
    assert machine == [name for name in names(Sweep) if name in machine]
    assert "--rounds" not in names(Sweep)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_says_what_depends_on_it(name: str) -> None:
    changed, decides, machine = other(name), name in names_of("numbers"), name in names_of("machine")
    keys = [RunKey.of("synthetic", "fedavg", 0, asdict(settings)) for settings in (PLAIN, changed)]
    assert (keys[0] != keys[1]) is decides
    assert bool(recipe(PLAIN).differs(recipe(changed))) is decides
    assert (recipe(changed).command() == recipe(PLAIN).command()) is machine
    kept = getattr(on_the_same_machine(PLAIN, changed), name)
    assert (kept == getattr(PLAIN, name)) is decides


# Values that a small run notices.
NOTICED: dict[str, Any] = {
    "rounds": 3,
    "solver": fw.Solver(lr=0.5),
    "participation": 0.5,
    "clients_per_round": 1,
    "probe_samples": 1,
    "codec": "int8",
    "selection": "size",
    "finetune": 1.0,
    "target": -1.0,
    "patience": 1,
    "attack": "signflip:share=0.4",
    "defence": "median",
}


@pytest.mark.parametrize("name", names_of("numbers"))
def test_a_setting_that_decides_the_numbers_changes_them(ragged: fw.Federation, name: str) -> None:
    task = fw.Task(make_model, ragged, rounds=2)
    options: dict[str, Any] = {"progress": False, "eval_every": 1}
    options |= {"participation": 0.5} if name == "selection" else {}  # else all take part
    plain = fw.compare(task, "adafedadam", **options)
    changed = fw.compare(task, "adafedadam", **options, **{name: NOTICED[name]})
    one, other = plain.runs[0], changed.runs[0]
    more = len(plain) != len(changed)
    assert more or one.rounds != other.rounds or not torch.equal(one.loss, other.loss)


def test_settings_at_their_defaults_are_no_part_of_a_digest() -> None:
    """So that directories outlive the next setting."""
    made = recipe(PLAIN)
    kept = json.loads(json.dumps(made.to_json()))
    del kept["settings"]["patience"], kept["settings"]["solver"]["clip"]
    assert Recipe.from_json(kept).digest == made.digest
    assert recipe(replace(PLAIN, patience=3)).digest != made.digest
    assert recipe(replace(PLAIN, solver=fw.Solver(clip=1.0))).digest != made.digest


def test_an_integer_is_the_same_setting_as_its_float() -> None:
    whole, real = (fw.Settings(participation=one, solver=fw.Solver(lr=one, clip=one)) for one in (1, 1.0))
    assert recipe(whole).digest == recipe(real).digest
    keys = [RunKey.of("synthetic", "fedavg", 0, asdict(settings)) for settings in (whole, real)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("solver", "options"),
    [
        (fw.Solver(optimizer=torch.optim.Adagrad), ""),
        (fw.Solver(optimizer="adam", betas=(0.8, 0.9)), " --solver adam"),
        (fw.Solver(momentum=0.9, nesterov=True, steps=(1, 3)), " --steps 1 3 --solver nesterov"),
        (fw.Solver(momentum=0.5), " --momentum 0.5 --solver momentum"),
    ],
)
def test_a_command_has_only_options_that_there_are(solver: fw.Solver, options: str) -> None:
    made = Recipe("mine.py:task", ("fedavg",), (0,), fw.Settings(rounds=3, solver=solver))
    assert (
        made.command() == f"fairwind compare mine.py:task --algorithms fedavg --seeds 0 --rounds 3{options}"
    )
