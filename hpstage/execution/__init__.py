"""Training chains: the worker's side of every executor, the InlineExecutor, and simulated workers."""
