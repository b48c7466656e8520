"""The implementation of ``optimize``, from its arguments to its result."""
