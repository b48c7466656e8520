"""Loading batches, in this process or in torch's worker processes, with the same bits.

The order of samples is a function of (seed, epoch), and what is drawn while a sample is made one of (seed, position):
before each sample the global generators are keyed, wherever it is made. So neither the number of processes, nor which
of them made a sample, nor how far they have read ahead shows in a batch, and none of it is part of a state or a key.
"""
