"""Scheduling: which chain to train next, and on which worker. Pure."""
