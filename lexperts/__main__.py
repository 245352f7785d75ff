"""`python -m lexperts` is the command `lexperts`."""

from .cli import main

main()
