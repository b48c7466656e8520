"""Step backends: ways to train one batch."""
