"""Training of small targets and of DFlash drafters: `python -m nanodflash.train --help`."""
