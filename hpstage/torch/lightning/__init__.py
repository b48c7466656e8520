"""Lightning: LightningModule and LightningDataModule, trained by Lightning's own Trainer, forkable at any step."""

import warnings

from hpstage.torch.lightning.trainable import LightningTrainable

# Lightning 2.6 under torch 2.13 causes it by its own code, once in each process of a search.
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning, r"lightning\.pytorch\.utilities\._pytree")

__all__ = ["LightningTrainable"]
