"""Shah et al., "A Comedy of Estimators: On KL Regularization in RL Training of LLMs", arXiv 2512.21852."""
