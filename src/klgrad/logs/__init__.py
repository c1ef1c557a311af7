"""A run's logs: the honest report, what its KL term pulled on, and whether trainer and sampler agree."""

from .errors import LogError as LogError
from .examine import examine as examine
from .report import LogReport as LogReport
