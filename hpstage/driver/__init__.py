"""The driver: the loop between plan and workers, and this process's membership among several."""
