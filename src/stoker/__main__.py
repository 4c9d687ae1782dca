"""`python -m stoker`, which is how torchrun starts it."""

from stoker.cli import main

main()
