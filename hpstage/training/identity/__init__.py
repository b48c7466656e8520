"""What decides a trial's bits: code, data and environment, and the name made of them."""
