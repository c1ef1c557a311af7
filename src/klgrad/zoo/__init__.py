r"""KL losses as found in published code and papers, sound or not, by name: for study and audit.

The estimator is differentiated as a loss, with or without a ratio to the sampler, its detached value is put on the
score, where policy-gradient training would put it, or both. Every cell takes a `Rollout` and returns a scalar: summed
over the completion and averaged over completions, unless its name says otherwise. Where a ratio is used it is π/μ. The
exponentials saturate; a trainer's own code may overflow where these do not.
"""

from .cell import CELLS as CELLS, Cell as Cell, get as get
