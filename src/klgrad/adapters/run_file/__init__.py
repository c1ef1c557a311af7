"""The configuration of a run, in a framework's own format: what its KL descends, and the lines to change."""

from .finding import Finding as Finding, find as find
from .frameworks import read_run as read_run
from .run import Change as Change, Part as Part, Run as Run
