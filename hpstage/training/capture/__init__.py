"""Captures the state of all objects that training can reach: see :mod:`hpstage.training.capture.world`."""
