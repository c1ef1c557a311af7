"""Small tools that several folders share: atomic files, and the colours of figures."""
