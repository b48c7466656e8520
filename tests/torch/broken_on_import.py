"""Cannot be imported: here only so that code can name it."""

raise RuntimeError("not on this machine")
