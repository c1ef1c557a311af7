"""Kang et al., "AsyncOPD: How Stale Can On-Policy Distillation Be?", arXiv 2606.24143."""
