"""Imported by name, while a model is made."""

COUNTS: list[int] = []
