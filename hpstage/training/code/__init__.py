"""The code that training reaches: whose it is, what it names, what it may read and change. Its digest, for
keys, is in :mod:`hpstage.training.identity.code_identity`."""
