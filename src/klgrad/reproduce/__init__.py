"""The papers' tabular and analytic results, each computed, its claim checked, and drawn."""

from .pool import every_outcome as every_outcome
from .run import Outcome as Outcome, reproduce as reproduce
from .study import Check as Check, Settings as Settings, Study as Study
