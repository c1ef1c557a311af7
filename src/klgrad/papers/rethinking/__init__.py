"""Liu et al., "Rethinking KL Regularization in RLHF: From Value Estimation to Gradient Optimization".

arXiv 2510.01555.
"""
