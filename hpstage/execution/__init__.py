"""Training chains in this process, really or simulated."""
