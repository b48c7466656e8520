"""The commands of ``hpstage``, one file each; :mod:`hpstage.cli.app` puts them together."""
