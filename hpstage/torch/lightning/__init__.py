"""Lightning: LightningModule and LightningDataModule, trained by Lightning's own Trainer, forkable at any step."""

from hpstage.torch.lightning.trainable import LightningTrainable

__all__ = ["LightningTrainable"]
