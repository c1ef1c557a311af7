"""Problems small enough to sum over every outcome, in float64: the ground truth of every claim."""

from .groups import every_group as every_group
from .problem import Problem as Problem, autoregressive as autoregressive, bandit as bandit
from .space import CompletionSpace as CompletionSpace
from .targets import TARGETS as TARGETS, target_gradients as target_gradients
