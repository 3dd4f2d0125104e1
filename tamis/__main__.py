"""`python -m tamis`: the command line."""

import sys


def main() -> None:
    try:
        from tamis.cli.main import main as run_command
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tamis"):
            raise
        sys.exit(f"the tamis command needs the package {error.name}: pip install 'tamis[train]'")
    run_command()


if __name__ == "__main__":
    main()
