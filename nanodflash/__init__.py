"""nanodflash: Qwen3 decoded with DFlash block-diffusion drafters.

Dimension letters, in every shape: B requests in the batch, S block size, W rows verified (S, or
1), T flattened tokens, C hidden size, Hq / Hkv heads, D head dim, L layers, F tapped layers,
V vocabulary, P page size, N pages.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Resolved on first use: the bookkeeping modules then import without torch.
_PUBLIC = {
    "LLM": "nanodflash.llm",
    "GenerationOutput": "nanodflash.engine.sequence",
    "SamplingParams": "nanodflash.config",
    "Chunk": "nanodflash.engine.sequence",
}
__all__ = ["LLM", "Chunk", "GenerationOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nanodflash' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _find_kernels() -> None:
    """In a bare checkout, let `nanodflash.kernels` be the folder `kernels/` beside this package.

    A bare `kernels` on the path could be the PyPI package of that name, so the folder is only
    taken when our `pyproject.toml` stands beside it. A wheel holds the kernels in this package.
    """
    here = Path(__file__).parent
    source = here.parent / "kernels" / "__init__.py"
    if (here / "kernels").exists() or not (here.parent / "pyproject.toml").is_file():
        return
    spec = importlib.util.spec_from_file_location("nanodflash.kernels", source)
    if source.is_file() and spec is not None:
        sys.meta_path.insert(0, _Finder(spec))  # before an editable install of another checkout


class _Finder:
    """Answers for `nanodflash.kernels` alone; its submodules are found through its path."""

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        self.spec = spec

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The import protocol of `sys.meta_path`."""
        return self.spec if name == self.spec.name else None


_find_kernels()
