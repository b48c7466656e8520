"""Elastic training: a step is cut into virtual nodes, trained by one process or by a gang of several.

A batch is cut into V equal micro-batches. For each, a virtual node computes loss and gradients as if it were alone,
with random streams of its own and the same buffers at its start. Gradients and buffers are averaged in one fixed binary
tree over V, and the optimizer makes one step. In a gang of W processes, each trains V / W neighbouring nodes, sums
their subtree, and combines the sum with those of the others. So the bits depend on V alone, not on W. All processes of
a gang hold the whole model, and do everything else in a step (the data, the optimizer) in the same way.
"""
