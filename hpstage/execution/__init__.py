"""Training chains: in this process, or as if."""
