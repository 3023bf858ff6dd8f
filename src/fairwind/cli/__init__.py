"""The command line: compare, resume, report, export, tune, paper, sweep, data, list, completion."""

import io
import os
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Union

import tyro

from fairwind import __version__
from fairwind.cli.catalogue import Data, List
from fairwind.cli.compare import Compare
from fairwind.cli.export import Export
from fairwind.cli.options import described, mistake, names
from fairwind.cli.report import Report
from fairwind.cli.resume import Resume
from fairwind.cli.study import Paper, Sweep
from fairwind.cli.terminal import err, out
from fairwind.cli.tune import Tune
from fairwind.engine.backends.graphs import out_of_memory
from fairwind.engine.ranks import find
from fairwind.errors import InputError, first_line, unknown
from fairwind.runs.folder import explained

PATIENCE = 10  # seconds


def _refuse(command: Any, word: str) -> InputError:
    """What to say of a word that the command does not know."""
    if not word.startswith("-"):
        return InputError(f"unexpected argument {word!r}: see --help for what goes where")
    return unknown("option", word, names(type(command)))


@described
@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in a shell: eval "$(fairwind completion bash)"."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell. For zsh, write it to a file named _fairwind in a folder of $fpath; for fish, to
    ~/.config/fish/completions/fairwind.fish."""

    def run(self) -> None:
        made = io.StringIO()
        with redirect_stdout(made), suppress(SystemExit):
            _read(["--tyro-write-completion", self.shell, "-"])
        script = made.getvalue()
        if self.shell == "bash":  # where nothing matches, bash completes names of files
            script = script.replace("complete -F", "complete -o default -F")
            script = script.replace("matches+=(", '[[ -n "$completion" ]] && matches+=(')
        print(script, end="")


KINDS: dict[str, type] = {
    "compare": Compare,
    "resume": Resume,
    "report": Report,
    "export": Export,
    "tune": Tune,
    "paper": Paper,
    "sweep": Sweep,
    "data": Data,
    "list": List,
    "completion": Completion,
}
COMMANDS = tuple(KINDS)
COMMAND: Any = Union[*(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in KINDS.items())]


DESCRIPTION = (
    "Fast, fair federated learning. 'fairwind COMMAND --help' shows the options of a command, "
    "'fairwind --version' the version."
)


def _read(words: list[str]) -> Any:
    return tyro.cli(
        COMMAND,
        args=words,
        prog="fairwind",
        description=DESCRIPTION,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _parse(words: list[str]) -> tuple[Any, list[str]]:
    """The command the user typed, and the words it does not know."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            command, rest = _read(words)
            return command, rest
    except SystemExit as stop:
        if stop.code != 2:
            raise
        wrong = mistake(KINDS[words[0]], words[1:])
        if not wrong:  # the parser's own words, then
            sys.stderr.write(said.getvalue())
            raise
        raise InputError(f"{wrong}; see 'fairwind {words[0]} --help'") from None


def _fail(message: str) -> NoReturn:
    """One line of error and exit code 2; what rank 0 stumbles over too, it alone says."""
    if err.quiet:
        time.sleep(PATIENCE)  # when rank 0 fails, torchrun ends this rank meanwhile
        err.quiet = False
    err.print(f"fairwind: error: {message}", style="red", soft_wrap=True)
    sys.exit(2)


def _run(command: Any) -> None:
    try:
        command.run()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich's way, if nobody reads the output
            raise
        raise InputError(
            f"the task's or an algorithm's own code called sys.exit({stop.code}), so there are no results: "
            "take that call out of it"
        ) from stop


def _prepare() -> None:
    """Where output goes: that of ranks but the first nowhere, and no letter is an error."""
    if not find().first:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        err.quiet = True
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode, or a name that is no text
    warnings.showwarning = lambda message, *_: err.print(f"fairwind: {message}", soft_wrap=True)


def main() -> NoReturn:
    """Runs a command; a user's mistake is one line and exit code 2."""
    _prepare()
    try:
        words = sys.argv[1:] or ["--help"]
        if words[0] in ("--version", "-V"):
            out.print(f"fairwind {__version__}")
            sys.exit(0)
        if words[0] == "help":
            words = [*words[1:2], "--help"]
        if words[0].startswith("-") and words[0] not in ("--help", "-h"):
            raise unknown("option", words[0], ("--help", "--version"))
        if words[0] not in (*COMMANDS, "--help", "-h"):
            raise unknown("command", words[0], COMMANDS)
        command, rest = _parse(words)
        if rest:
            raise _refuse(command, rest[0])
        if find().first or isinstance(command, Compare | Resume):
            _run(command)
    except InputError as error:
        _fail(str(error))
    except BrokenPipeError:  # nobody reads the output: as rich does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(explained(error))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not out_of_memory(error):
            raise
        _fail(f"not enough memory: {first_line(error)}; take fewer clients, or a smaller model")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
