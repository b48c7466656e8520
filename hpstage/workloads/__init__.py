"""Reference workloads: models of the literature as short, complete trainables on real files, to read, run and copy.

Each file has one trainable, with its sizes and the place of its data as arguments of the constructor, and the function
``space``. On the command line, data are named by an environment variable.
"""
