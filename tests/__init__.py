"""The tests. Hypothesis sets no deadlines: on shared cores a time says nothing about the code.

Processes are forked from one that has imported what many of them need.
"""

import multiprocessing

from hypothesis import settings

settings.register_profile("hpstage", deadline=None)
settings.load_profile("hpstage")

multiprocessing.set_forkserver_preload(
    [
        "pytest",
        "hpstage.testing",
        "tests.store.test_journals",
        "tests.store.test_two_processes",
        "tests.studies.test_identity",
    ]
)
