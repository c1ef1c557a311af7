"""Kernels for Hopper GPUs (compute capability 9.0), with the matrix products of both models inside. In Gluon."""
