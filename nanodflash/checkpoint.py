"""Hub id or folder -> files -> weights in place, strictly."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn


def save_model(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write `config.json` and `model.safetensors` (bf16), named as the public checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part.view().to(torch.bfloat16).contiguous()
        for name, part in model.parts().items()  # type: ignore[operator]
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
