"""The papers' tabular and analytic results, each computed, its claim checked, and drawn."""

from .study import (
    Check as Check,
    Outcome as Outcome,
    Settings as Settings,
    Study as Study,
    every_outcome as every_outcome,
    reproduce as reproduce,
)
