"""Elastic training: a step is cut into virtual nodes, trained by one process or by several together, a gang.

A batch is cut into V equal micro-batches. For each, a virtual node computes loss and gradients as if it were alone,
with random streams of its own, beginning with the same buffers. Gradients and buffers are averaged in one fixed binary
tree over V, and the optimizer makes one step. Of a gang of W processes, each trains V / W neighbouring nodes, sums
their subtree, and gathers those of the others: so the bits depend on V alone. All processes of a gang hold the whole
model and do everything else of a step (the data, the optimizer) in the same way.
"""
