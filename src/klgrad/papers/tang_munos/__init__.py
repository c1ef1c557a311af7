"""Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477."""
