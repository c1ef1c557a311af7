"""The papers' tabular and analytic results, each computed, its claim checked, and drawn."""

from .study import Check as Check, Settings as Settings, Study as Study
from .study_runner import Outcome as Outcome, reproduce as reproduce
from .worker_pool import every_outcome as every_outcome
