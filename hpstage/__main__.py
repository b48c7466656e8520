"""The process of the command line: ``hpstage``, and ``python -m hpstage`` where that script is not on the path."""

import atexit
import gc
import sys

from hpstage.cli.app import main


def run() -> None:
    """Run a command, and end this process.

    Commands that read a plan once do without garbage collection: it finds nothing in a plan, and doubles their time.
    """
    if sys.argv[1:2] in (["status"], ["tree"], ["report"], ["export"]) and "--watch" not in sys.argv:
        gc.disable()
        atexit.register(gc.freeze)  # else all is looked at once more as the interpreter ends
    main()


if __name__ == "__main__":
    run()
