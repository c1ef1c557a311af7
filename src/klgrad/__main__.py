"""`python -m klgrad`."""

from .cli import main

main()
