"""Reference workloads: models of the literature as short, complete trainables on real files, to read, run and copy.

Each file has a trainable, whose constructor takes its sizes and the path of its data, and the function ``space``. On
the command line, an environment variable gives the path.
"""
