"""What a whole policy loss does: its KL, its drift to or from the sampler, and its policy gradient."""

from .probing import audit_whole as audit_whole
from .table import POLICY_GRADIENTS as POLICY_GRADIENTS, PolicyGradient as PolicyGradient
from .weighting import Weighting as Weighting
from .whole_result import Drift as Drift, Side as Side, Update as Update, WholeResult as WholeResult
