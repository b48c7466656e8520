"""Loading batches, in this process or in torch's worker processes, with the same bits.

The order of samples is a function of (seed, epoch). The random numbers drawn while a sample is made are a function of
(seed, position): every process seeds the global generators before each sample. So the number of processes, which of
them made a sample, and how far they have read ahead do not show in a batch, and are not part of any state or key.
"""
