"""A run's logs: the honest report, what its KL term pulled on, and whether trainer and sampler agree."""

from .examination import examine as examine
from .log_errors import LogError as LogError
from .log_report import LogReport as LogReport
