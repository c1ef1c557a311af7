"""Yao et al., FRPO, arXiv 2601.10201, against Shah et al., "A Comedy of Estimators", arXiv 2512.21852."""
