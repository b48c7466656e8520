"""The commands of ``hpstage``, one file each; :mod:`hpstage.cli.app` combines them."""
