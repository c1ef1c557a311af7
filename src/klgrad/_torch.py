"""Imports torch, without its warning that NumPy is missing: nothing that needs torch alone uses NumPy."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch as torch
