"""`python -m featcal_hf` is `featcal-hf`."""

from featcal_hf.cli import main

main()
