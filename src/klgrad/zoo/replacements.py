"""What to use instead of the unsound cells, where several cells have the same replacement."""

from ..core.importance import ImportanceWeighting
from ..core.term import KLTerm
from ..remedies import Remedy

TOKEN = KLTerm(level="token")
TOKEN_RATIO = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None))
K2_OR_TOKEN = Remedy(use=("k2-loss", TOKEN))
BOUNDED = Remedy(use=(KLTerm(level="token", influence_bound=5.0),), why="its coefficient is bounded and never zero")
SUMMED = Remedy(use=(TOKEN,), why="it sums over the completion")
AFTER_DIVISION = Remedy("subtract β times the coefficient of a KLTerm from the advantage after the division")
LEAVE_ONE_OUT = Remedy(use=("k1-reward-leave-one-out", KLTerm(baseline="leave_one_out")))
