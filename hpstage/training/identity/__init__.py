"""The identity of a trial: the code, data and environment that decide its bits, and the key derived from them."""
