"""What is wrong on a host, for a process that has this folder on its PYTHONPATH: its clock, its way to a place.

``HPSTAGE_TEST_CLOCK``: seconds by which the clock is off. ``HPSTAGE_TEST_REFUSED``: a path, and files, by the path
separator; while one of these files is there, whatever is done below the path fails with the error that it names.
"""

import errno
import os
import sys
import time

if shift := float(os.environ.get("HPSTAGE_TEST_CLOCK", "0")):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + shift
    time.time_ns = lambda: _time_ns() + int(shift * 1e9)

if refused := os.environ.get("HPSTAGE_TEST_REFUSED"):
    _place, *_orders = refused.split(os.pathsep)
    _audited = {"open", "os.mkdir", "os.rename", "os.scandir", "os.listdir", "os.remove", "os.rmdir"}

    def _refuse(event, arguments):
        # Also root is refused by this, which no mode of a file does.
        if event in _audited and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(_place):
                for order in _orders:
                    try:
                        with open(order) as file:
                            name = file.read()
                    except FileNotFoundError:
                        continue
                    number = getattr(errno, name or "EACCES")  # empty while it is being written
                    raise OSError(number, os.strerror(number), path)

    sys.addaudithook(_refuse)
