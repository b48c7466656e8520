"""The hook that sees what training reads is out of the way of the interpreter itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
from hpstage.training.identity.watching import Watch

with Watch():
    pass
raise LookupError("of the program")
"""


def test_an_uncaught_traceback_shows_source_lines_after_file_reads_were_watched(tmp_path: Path) -> None:
    """It opens the file with no Python code running."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert '    raise LookupError("of the program")\nLookupError: of the program' in done.stderr
