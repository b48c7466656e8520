"""Estimate the cost of a search before training anything."""
