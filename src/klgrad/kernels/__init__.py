"""Exact KLs without storing the logits: from hidden states, from given logits, or over the top k of a vocabulary."""

from .dense_logits import from_logits as from_logits
from .entries import TopEntries as TopEntries, top_entries as top_entries
from .fused_statistics import TokenStatistics as TokenStatistics, token_statistics as token_statistics
from .head import Head as Head, check_head as check_head
from .plan import Plan as Plan, make_plan as make_plan
from .topk import lumped_kl as lumped_kl, sampled_tail_kl as sampled_tail_kl
