"""What decides a trial's bits: code, data and environment, and the key derived from them."""
