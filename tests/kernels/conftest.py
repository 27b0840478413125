"""The cases need Triton's interpreter, in a process of its own, or a GPU."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["cases"]
