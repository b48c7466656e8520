"""One call of ``optimize``: from its arguments to its result."""
