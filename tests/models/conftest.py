"""Models are tested as runs are: without network, with a cache of the test's own."""

from training.conftest import _alone, model  # noqa: F401
