"""Triton kernels; imported as `nanodflash.kernels`. Empty so far: the ops run in plain torch."""
