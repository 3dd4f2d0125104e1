"""`python -m tamis`: the command line."""

from tamis.cli.main import main

if __name__ == "__main__":
    main()
