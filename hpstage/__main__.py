"""``python -m hpstage``: the command line, where the script of that name is not on the path."""

from hpstage.cli.app import main

if __name__ == "__main__":
    main()
