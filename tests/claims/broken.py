"""Print the claims that do not hold: `python broken.py NAME...`; used on mutated copies of the package."""

import sys

from klgrad.audit import audit
from klgrad.audit.subject import every_term

TERMS = {term.name: term for term in every_term()}

for name in sys.argv[1:]:
    result = audit(TERMS[name])
    scales = list(result.scale_by_shape.values()) or [1.0]
    sound = (result.verdict, result.verdict_off_policy) == TERMS[name].descends
    if not sound or max(abs(scale - 1) for scale in scales) > 1e-9:
        print("broken:", name, result.verdict, result.verdict_off_policy, scales)
