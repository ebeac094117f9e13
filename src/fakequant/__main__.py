"""`python -m fakequant` is the command `fakequant`."""

from fakequant.cli import main

main()
