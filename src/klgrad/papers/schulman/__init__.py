"""Schulman, "Approximating KL Divergence", 2020."""
