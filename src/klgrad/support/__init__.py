"""Tools that several packages share: atomic files, and the colours of figures."""
