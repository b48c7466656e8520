"""What a trainable consists of, and how all of it is captured: see :mod:`hpstage.training.capture.world`."""
