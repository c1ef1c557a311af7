"""The generated reference of the site: a page for each estimator, each loss of the zoo and each target."""

from . import estimators, targets, zoo

FOLDERS = ("estimators", "zoo", "targets")
"""The folders of docs/ that hold these pages and nothing else."""


def pages() -> dict[str, str]:
    """The text of every generated page, by its path in docs/."""
    return estimators.pages() | zoo.pages() | targets.pages()
