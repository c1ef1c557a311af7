"""Call a loss that a user wrote: find its arguments by their names, and the loss in what it returns."""

from .construct import constructed as constructed
from .own_loss import OwnLoss as OwnLoss, name_of as name_of, own_loss as own_loss, summary_of as summary_of
from .results import scalar as scalar
from .settings import Settings as Settings, parse_settings as parse_settings
from .signature import loss_methods as loss_methods, own_settings as own_settings
