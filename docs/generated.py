"""Parts of pages that are written from the package: what commands say of themselves, and fields of files.

A page asks for one with `<!-- help: COMMAND -->` or `<!-- schema: NAME -->`.
"""

import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fairwind.cli import main

SCHEMAS = Path(__file__).parent / "schemas"
ASKED = re.compile(r"<!-- (help|schema): (\w+) -->")


def with_generated(text: str) -> str:
    """A page's text, with what it asks for."""
    made = {"help": command_help, "schema": schema_table}
    return ASKED.sub(lambda found: made[found[1]](found[2]), text)


def command_help(command: str) -> str:
    """What a command says of itself, as a block."""
    said = io.StringIO()
    asked = patch.object(sys, "argv", ["fairwind", command, "--help"])
    with asked, patch.dict(os.environ, COLUMNS="88"), redirect_stdout(said), suppress(SystemExit):
        main()
    lines = [part for line in said.getvalue().splitlines() for part in textwrap.wrap(line, 88) or [""]]
    return "\n".join(["```text", *lines, "```"])


def schema_table(name: str) -> str:
    """The fields of a file, from its JSON Schema."""
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    lines = [f"| `{path}` | {kind} | {words} |" for path, kind, words in _fields(schema, schema, "")]
    return "\n".join(["| field | type | |", "|---|---|---|", *lines])


def _fields(schema: dict[str, Any], root: dict[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    for option in schema.get("anyOf", []):
        yield from _fields(root["$defs"][option["$ref"].rpartition("/")[2]], root, path)
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, _kind(field), field.get("description", "")
        if "$ref" in field and here in ("runs[].final", "runs[].new_clients", "summary[].new_clients"):
            continue  # the measures are listed once, with the summary
        yield from _fields(field, root, here)
        if "items" in field:
            yield from _fields(field["items"], root, f"{here}[]")


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return {"measures": "object", "over_seeds": "mean, std"}.get(
            field["$ref"].rpartition("/")[2], "object"
        )
    kind = field.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
