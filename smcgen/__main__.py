"""`python -m smcgen`."""

from smcgen.cli import main

main()
