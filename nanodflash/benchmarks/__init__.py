"""What `bench.py` runs."""
