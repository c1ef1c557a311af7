"""Problems small enough to sum over every completion in float64, and the exact gradient of every target on them."""

from .exact_gradients import OBJECTIVES as OBJECTIVES, target_gradients as target_gradients
from .large_batches import population as population, with_rational_sampler as with_rational_sampler
from .problem import Problem as Problem, autoregressive as autoregressive, bandit as bandit
from .sample_groups import every_group as every_group
from .space import CompletionSpace as CompletionSpace
