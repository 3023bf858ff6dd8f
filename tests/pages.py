"""Pages that run: a reader who follows a Markdown page, block by block, in a folder of their own.

- A block whose first line is a comment that names a file, `# clinics.py`, is written to that file.
- Other `python` blocks are executed in order, and share their names.
- In a `console` block lines that begin with `$ ` are commands, and what follows each is what it prints.
- An `output` block is what the Python block before it prints.
- Blocks of other kinds (`bash`, `toml`, `json`, …) are read, not run.

Shown and printed text must agree line by line; spaces and empty lines do not count, and neither do progress
bars, which go to stderr. `…` stands for anything in a line, and alone in a line for any number of lines.
Numbers with a decimal point agree within 1 % or one unit of their last digit: other processors round
differently.
"""

import io
import os
import re
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)
FILE = re.compile(r"# ([\w-]+\.\w+)\n")
DECIMAL = re.compile(r"-?\d+\.\d+")


def follow(page: Path, folder: Path) -> int:
    """Does all that a page says, and returns how many blocks ran, or raises AssertionError."""
    sys.path.insert(0, str(folder))  # as where Python was started in that folder
    try:
        return _follow(page, folder)
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def _follow(page: Path, folder: Path) -> int:
    names: dict[str, Any] = {"__name__": "page"}
    ran, printed = 0, ""
    for block in BLOCK.finditer(page.read_text()):
        kind, code = block[2], re.sub(rf"^{block[1]}", "", block[3], flags=re.M)
        where = f"{page.name}, line {page.read_text()[: block.start()].count(chr(10)) + 1}"
        if file := FILE.match(code):
            (folder / file[1]).write_text(code)
        elif kind == "python":
            printed = _execute(code, names, folder, where)
        elif kind == "output":
            compare(code, printed, where)
        elif kind == "console":
            for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", code, re.M):
                compare(shown, _run(command, folder, where), where)
        else:
            continue
        ran += 1
    return ran


def _execute(code: str, names: dict[str, Any], folder: Path, where: str) -> str:
    out = io.StringIO()
    with chdir(folder), redirect_stdout(out):
        exec(compile(code, where, "exec"), names)
    return out.getvalue()


def _run(command: str, folder: Path, where: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stderr}"
    return done.stdout


def compare(shown: str, printed: str, where: str) -> None:
    """AssertionError where a page shows something and something else was printed."""
    a, b = (
        [" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (shown, printed)
    )
    if a:
        assert _agree(a, b), f"{where}: the page shows\n{shown}\nand this was printed:\n{printed}"


def _agree(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == "…":
        return any(_agree(shown[1:], printed[i:]) for i in range(len(printed) + 1))
    return bool(printed) and same_line(shown[0], printed[0]) and _agree(shown[1:], printed[1:])


def same_line(shown: str, printed: str) -> bool:
    """Whether a line is what the page shows, up to rounding."""
    parts = [re.escape(part).replace("…", ".*?") for part in DECIMAL.split(shown)]
    found = re.fullmatch(f"({DECIMAL.pattern})".join(parts), printed)
    return found is not None and all(
        abs(float(a) - float(b)) <= max(0.01 * abs(float(a)), 10.0 ** -len(a.partition(".")[2]) * 1.001)
        for a, b in zip(DECIMAL.findall(shown), found.groups(), strict=True)
    )
