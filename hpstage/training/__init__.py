"""Training functions and other trainables, and the capture of their state."""
