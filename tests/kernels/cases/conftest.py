"""Tensors of the cases live where the kernels run; one thread."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with numpy, which warns of NaN, infinities and old ways."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for kind in ("RuntimeWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.device(DEVICE):
        yield
