"""The identity of a trial, which decides its bits: code, data and environment, and the key derived from them."""
