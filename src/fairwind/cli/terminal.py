"""What the commands say, and where."""

from rich.console import Console

from fairwind.runs.progress import Messages

out = Console(highlight=False)
err = Messages()


def say(text: str) -> None:
    err.print(text, soft_wrap=True)


def note(text: str) -> None:
    """Says something about what is there."""
    say(f"fairwind: {text}")
