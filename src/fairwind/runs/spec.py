"""Specs: a name and its parameters as text, as in "adafedadam:alpha=2,warmup=none"."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from fairwind.errors import InputError, shown, unknown
from fairwind.runs.hints import LOCAL, near, setting

T = TypeVar("T")
Parameters = Mapping[str, tuple[Any, Any]]  # type and default of each, by name

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}


def call(kind: str, spec: str, registry: Mapping[str, Callable[..., T]]) -> T:
    """Calls the builder a spec names, with the parameters it gives."""
    given = arguments(kind, spec, {name: parameters(builder) for name, builder in registry.items()})
    return registry[spec.partition(":")[0]](**given)


def arguments(kind: str, spec: str, registry: Mapping[str, Parameters]) -> dict[str, Any]:
    """All parameters of a spec: those it gives, and defaults."""
    if not isinstance(spec, str):
        raise InputError(f"{kind}={shown(spec)} is not a name: give one of {', '.join(registry)}")
    name, _, rest = spec.partition(":")
    if name not in registry:
        raise unknown(kind, name, registry)
    types_of = registry[name]
    given: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, text = item.partition("=")
        if key not in types_of:
            if near(key, types_of) is None and (meant := setting(key)):
                option = f"--{meant.replace('_', '-')}"
                whose = f"solver=fairwind.Solver({meant}=…)" if meant in LOCAL else f"{meant}=…"
                raise InputError(
                    f"{key!r} is no parameter of {name}, but a setting of all runs: {option} on the command "
                    f"line, {whose} in Python"
                )
            raise unknown(f"parameter of {name}", key, types_of)
        if not equals:
            raise InputError(f"parameter {key!r} of {name} has no value: write {key}=…")
        given[key] = _parse(f"{name}:{key}", text, types_of[key][0])
    return {key: default for key, (_, default) in types_of.items()} | given


def with_parameters(spec: str, **given: Any) -> str:
    """A spec with parameters added, unless it has them already."""
    present = dict(item.partition("=")[::2] for item in filter(None, spec.partition(":")[2].split(",")))
    texts = {key: _text(value) for key, value in given.items()}
    items = [f"{key}={text}" for key, text in (texts | present).items()]
    return spec.partition(":")[0] + (":" + ",".join(items) if items else "")


def _text(value: Any) -> str:
    """A value as `_parse` reads it: the same number again, to the last bit."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return "none" if value is None else str(value)


def expand(spec: str) -> list[str]:
    """Expands braces: "adafedadam:alpha={0,1}" becomes two specs."""
    found = re.search(r"\{([^{}]*)\}", spec)
    if found is None:
        if "{" in spec or "}" in spec:
            raise InputError(f"{spec!r} has a brace without its partner: write name:parameter={{1,2}}")
        return [spec]
    before, after = spec[: found.start()], spec[found.end() :]
    return [each for value in found[1].split(",") for each in expand(before + value.strip() + after)]


@cache
def parameters(builder: Callable[..., Any]) -> Parameters:
    """Type and default of each keyword parameter a builder takes."""
    hints = typing.get_type_hints(builder)
    given = inspect.signature(builder).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in given if p.kind is p.KEYWORD_ONLY}


def _parse(name: str, text: str, kind: Any) -> Any:
    """A value of the annotated type, read from text."""
    joined = typing.get_origin(kind) in (types.UnionType, typing.Union)
    choices = typing.get_args(kind) if joined else (kind,)
    for choice in choices:
        if choice is types.NoneType and text.lower() == "none":
            return None
        if choice is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if choice is str:
            return text
        if typing.get_origin(choice) is typing.Literal and text in typing.get_args(choice):
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    named = [typing.get_args(c) or (WORDS.get(c, str(c)),) for c in choices]
    wanted = " or ".join(name for names in named for name in names)
    raise InputError(f"{name}={text!r} is not {wanted}")
