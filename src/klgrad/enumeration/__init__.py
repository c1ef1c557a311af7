"""Problems small enough to sum over every outcome, in float64: the ground truth of every claim."""

from .exact_gradients import TARGETS as TARGETS, target_gradients as target_gradients
from .problem import Problem as Problem, autoregressive as autoregressive, bandit as bandit
from .sample_groups import every_group as every_group
from .space import CompletionSpace as CompletionSpace
