"""Examines the logs of a run: KL estimates, coefficients of the KL term, and whether trainer and sampler agree."""

from ..errors import LogError as LogError
from .examination import LogReport as LogReport, examine as examine
