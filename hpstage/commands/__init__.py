"""The commands of ``hpstage``, one file each; :mod:`hpstage.cli` puts them together."""
