"""Finds all that a trainable consists of, and captures it: see :mod:`hpstage.training.capture.world`."""
