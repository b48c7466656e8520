"""The tests. Hypothesis sets no deadlines: on shared cores a time says nothing about the code."""

from hypothesis import settings

settings.register_profile("hpstage", deadline=None)
settings.load_profile("hpstage")
