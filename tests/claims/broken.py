"""Print the claims that do not hold: `python broken.py NAME...`; used on mutated copies of the package."""

import sys

from klgrad.audit import audit
from klgrad.audit.subject import every_term

TERMS = {term.name: term for term in every_term()}

for name in sys.argv[1:]:
    result = audit(TERMS[name])
    scales = [result.scale if result.scale is not None else 1.0]
    sound = (result.verdict, result.verdict_off_policy) == TERMS[name].descends
    sound = sound and result.anatomy.baseline.name == TERMS[name].baseline.replace("_", "-")
    if not sound or max(abs(scale - 1) for scale in scales) > 1e-9:
        print("broken:", name, result.verdict, result.verdict_off_policy, scales)
