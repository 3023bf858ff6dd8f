"""The command `fairwind`, which tells how to install what it needs."""

import sys

from fairwind.errors import NEEDED, needs_extra


def main() -> None:
    try:
        from fairwind.cli import main as run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        print(f"fairwind: error: {needs_extra('the command line', missing, 'cli')}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
