"""Entry point of the command line: ``hpstage``, or ``python -m hpstage`` where that script is not on the path."""

import atexit
import gc
import sys

from hpstage.cli.app import main


def run() -> None:
    """Run the command of ``sys.argv``, and end this process.

    Commands that read a plan once run without garbage collection: it would free nothing, and double their time.
    """
    if sys.argv[1:2] in (["status"], ["tree"], ["report"], ["export"]) and "--watch" not in sys.argv:
        gc.disable()
        atexit.register(gc.freeze)  # else the interpreter collects garbage once more as it ends
    main()


if __name__ == "__main__":
    run()
