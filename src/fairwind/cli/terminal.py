"""What the commands say, and where."""

from rich.console import Console

from fairwind.training import messages

out = Console(highlight=False)
err = messages()


def say(text: str) -> None:
    err.print(text, soft_wrap=True)
