"""The loop between plan and workers, and this process's part among several."""
