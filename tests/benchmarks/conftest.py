"""The scripts of `benchmarks/` are tested as runs are: without network, on one thread."""

from training.conftest import _alone, model  # noqa: F401
