"""Triton kernels; imported as `nanodflash.kernels`.

Each module holds the device form of operations that `nanodflash.ops` defines, and imports nothing
of nanodflash. Import the modules themselves: this package must load where Triton is missing.
Nothing here waits for the device or branches on what it holds, so every call can be captured.
"""
