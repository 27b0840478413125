"""The cases need Triton's interpreter, in a process of its own, or a GPU."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["cases"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is slow runs when it is asked for."""
    if not config.option.markexpr:
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
