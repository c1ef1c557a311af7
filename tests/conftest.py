"""One thread: the tensors are tiny, and threads only wait for each other."""

import gc

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("klgrad", derandomize=True, deadline=None)
settings.load_profile("klgrad")


def pytest_collection_finish():
    """Leave what the imports made out of garbage collection, which transformers starts after every training run.

    It would take half a second each time, longer than most of the runs.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """At the end of the process, extensions complain of objects that were not freed."""
    gc.unfreeze()
