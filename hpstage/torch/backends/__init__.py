"""Step backends: ways to train a TorchTrainable on one batch, one file each. Others are plugins (:mod:`.backend`)."""
