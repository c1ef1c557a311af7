"""Exact KLs without storing the logits: from hidden states, from given logits, or over the top k of a vocabulary."""

from .fused_statistics import (
    TokenStatistics as TokenStatistics,
    from_logits as from_logits,
    token_statistics as token_statistics,
)
from .head import Head as Head, check_head as check_head
from .tiling import (
    TilePlan as Plan,  # noqa: F401  its name until the next release
    TilePlan as TilePlan,
    make_plan as make_plan,
)
from .topk import (
    TopEntries as TopEntries,
    head_kl as head_kl,
    lumped_kl as lumped_kl,
    sampled_tail_kl as sampled_tail_kl,
    top_entries as top_entries,
)
