"""`python -m tamis`: the command line."""

import sys


def main() -> None:
    if sys.argv[1:2] == ["remote"]:  # needs no package, so that it runs on any laptop
        from tamis.remote.command import main as run_remote

        sys.exit(run_remote(sys.argv[2:]))
    try:
        from tamis.cli.main import main as run_command
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tamis"):
            raise
        sys.exit(f"the tamis command needs the package {error.name}: pip install 'tamis[train]'")
    run_command()


if __name__ == "__main__":
    main()
