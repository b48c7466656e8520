"""What a trainable is made of, and how all of it is captured: see :mod:`hpstage.training.capture.world`."""
