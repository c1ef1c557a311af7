"""Print the claims that do not hold: `python broken.py NAME...`; used on mutated copies of the package.

The audit names a curve by the package's own divergences, which may be mutated. So its name is also held against the
gradient of the target, which is summed from probabilities.
"""

import sys

from klgrad.audit import audit
from klgrad.audit.procedure import proof_cases
from klgrad.audit.subject import as_subject, every_term, of_reference, sum_over_rows

SAME = 1e-9
TERMS = {term.name: term for term in every_term()}


def is_gradient_of(subject, name):
    for case in proof_cases(on_policy=True):
        gradient = sum_over_rows(case.problem, case.members, of_reference(subject, case.batch())).mean
        if float((gradient - case.targets[name]).norm()) > SAME * float(case.targets[name].norm()):
            return False
    return True


for name in sys.argv[1:]:
    result = audit(TERMS[name])
    scales = [result.scale if result.scale is not None else 1.0]
    sound = (result.verdict, result.verdict_off_policy) == TERMS[name].descends
    sound = sound and result.anatomy.baseline.name == TERMS[name].baseline.replace("_", "-")
    sound = sound and is_gradient_of(as_subject(TERMS[name]), result.verdict)
    if not sound or max(abs(scale - 1) for scale in scales) > 1e-9:
        print("broken:", name, result.verdict, result.verdict_off_policy, scales)
