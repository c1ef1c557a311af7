"""The families of KL terms, one for each divergence at each level.

| family            | estimators       | discount | leave-one-out | ratios                                       |
|-------------------|------------------|----------|---------------|----------------------------------------------|
| reverse, sequence | k1, k1_k3, exact | (0, 1]   | yes           | none, prefix, sequence                       |
| reverse, token    | k1, exact        | 0        | sampled only  | none, token (sampled only), prefix, sequence |
| forward, token    | k3, exact        | 0        | sampled only  | none, prefix, sequence                       |
| forward, sequence | k3               | 1        | yes           | none, sequence                               |

An influence bound is for sampled estimators. The classes hold this table with the reasons for its empty cells; a test
compares the two.
"""

from .choices import Divergence, Level
from .family import Family as Family
from .forward import ForwardSequence, ForwardToken
from .reverse import ReverseSequence, ReverseToken

FAMILIES: dict[tuple[Divergence, Level], Family] = {
    (family.divergence, family.level): family
    for family in (ReverseSequence(), ReverseToken(), ForwardToken(), ForwardSequence())
}
"""The family of each divergence at each level."""
