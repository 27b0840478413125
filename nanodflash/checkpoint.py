"""Hub id or folder -> files -> weights in place, strictly.

A checkpoint is opened without its weights, so that what does not fit is refused before gigabytes
are downloaded. Then every header is checked before any tensor is read, and tensors go one by one
from the mapped files into the rows of the fused parameters.
"""

import glob
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from nanodflash.config import short
from nanodflash.models.layers import Part

CONFIG, GENERATION = "config.json", "generation_config.json"
TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("BF16", "F16", "F32", "F64")  # anything else is quantised, or not a weight
MAX_NAMES = 8  # an error names this many of a kind and counts the rest
OFFLINE = "is not (wholly) in the cache, and HF_HUB_OFFLINE is set: run once without it"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything but the weights is in `folder`.

    Args:
        name:     as the user wrote it.
        config:   the parsed `config.json`.
        revision: the hub's commit that `folder` holds; None for a local folder.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    revision: str | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text. Source: `eos_token_id` of `generation_config.json`, else of config.

        Raises:
            ValueError: it is neither an id nor a list of ids.
        """
        path = self.folder / GENERATION
        ids = _read_object(path).get("eos_token_id") if path.exists() else None
        if ids is None:
            path, ids = self.folder / CONFIG, self.config.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(i) is int and 0 <= i < 2**31 for i in listed):
            raise ValueError(
                f"{path}: eos_token_id is {short(ids)}, wanted an id or a list of ids (0 to 2^31-1)"
            )
        return tuple(listed)


def open_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and read its `config.json`; a hub id is downloaded without its weights.

    Args:
        name:     a folder, else a hub id. Token, cache, endpoint and offline mode are those of
                  huggingface_hub and its environment variables.
        revision: branch, tag or commit of a hub id.
    Raises:
        ValueError: there is no such checkpoint, or its `config.json` cannot be read.
    """
    if os.path.isdir(name):
        if revision is not None:
            raise ValueError(f"{name} is a local folder, revision {revision!r} needs a hub id")
        folder, commit = Path(name), None
    elif os.path.exists(name):
        raise ValueError(f"{name} is a file: give the folder that holds config.json")
    else:
        folder = _download(name, revision, [CONFIG, GENERATION, *TEXT])
        commit = folder.name  # the weights must come from the same commit, even if main moves on
    if not (folder / CONFIG).exists():
        raise ValueError(f"{name} holds no config.json: is it a model, in Hugging Face's format?")
    return Checkpoint(name, folder, _read_object(folder / CONFIG), commit)


def load_model(
    model_class: Callable[[Any], Model],
    config: Any,
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Model:
    """Build `model_class(config)` on `device` in `dtype`, ready for inference.

    Raises:
        ValueError: a file is absent or broken, or tensors and config do not name the same things.
    """
    with torch.device("meta"):
        model = model_class(config)
    placed = _weight_map(checkpoint)
    # A tied head is the embedding; some checkpoints carry the copy.
    ignored = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    with ExitStack() as stack:
        files = set(placed.values())
        shards = {file: stack.enter_context(_open(checkpoint.folder / file)) for file in files}
        _check(checkpoint.name, _parts(model), placed, shards, ignored)
        _allocate(model, device, dtype)
        for name, part in _parts(model).items():
            part.view().copy_(shards[placed[name]].get_tensor(name))
    return model.eval()


def save_model(folder: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write `config.json` and `model.safetensors` (bf16), named as the public checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: part.view().to(torch.bfloat16).contiguous() for name, part in _parts(model).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _parts(model: nn.Module) -> dict[str, Part]:
    return model.parts()  # type: ignore[operator]


def _allocate(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give the parameters memory. `to_empty` would part a tied head from its embedding.

    On a CPU matrices lie by columns: products of few rows are up to twice as fast so.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    by_columns = torch.device(device).type == "cpu"
    for module in model.modules():
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in made:
                shape = old.shape[::-1] if by_columns else old.shape
                empty = torch.empty(shape, device=device, dtype=dtype)
                empty = empty.t() if by_columns else empty
                made[old] = nn.Parameter(empty, requires_grad=False)
            setattr(module, key, made[old])


def _weight_map(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor -> the file that holds it; the files are there."""
    folder = checkpoint.folder
    if not ((folder / WEIGHTS).exists() or (folder / INDEX).exists()):
        _fetch(checkpoint, [WEIGHTS, INDEX])
    if (folder / WEIGHTS).exists():
        with _open(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    if not (folder / INDEX).exists():
        raise ValueError(
            f"{checkpoint.name} has neither {WEIGHTS} nor {INDEX}; only safetensors are read: "
            "convert other formats first"
        )
    placed = _read_object(folder / INDEX).get("weight_map")
    if not (isinstance(placed, dict) and placed):
        raise ValueError(f"{folder / INDEX} has no weight_map: download it again")
    for shard in placed.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{folder / INDEX}: {short(shard)} is not the name of a file beside it"
            )
    absent = [file for file in sorted(set(placed.values())) if not (folder / file).is_file()]
    if absent:
        _fetch(checkpoint, absent)
        absent = [file for file in absent if not (folder / file).is_file()]
    if absent:
        raise ValueError(f"{checkpoint.name} lacks {_some(absent)}, which {INDEX} names")
    return placed


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): download it again") from error


def _check(
    what: str,
    parts: dict[str, Part],
    placed: dict[str, str],
    shards: dict[str, Any],
    ignored: set[str],
) -> None:
    """ValueError that names all that differs between `parts` and the headers."""
    held = {file: set(shard.keys()) for file, shard in shards.items()}
    missing, misplaced, shapes, dtypes = [], [], [], []
    for name, part in parts.items():
        file = placed.get(name)
        if file is None:
            missing.append(name)
        elif name not in held[file]:
            misplaced.append(f"{name} (not in {file})")
        else:
            header = shards[file].get_slice(name)
            got, wanted, dtype = header.get_shape(), list(part.view().shape), header.get_dtype()
            if got != wanted:
                shapes.append(f"{name} is {got}, wanted {wanted}")
            if dtype not in DTYPES:
                dtypes.append(f"{name} is {dtype}, wanted {'/'.join(DTYPES)}")
    problems = {
        "missing": missing,
        "unexpected": sorted(set(placed).union(*held.values()) - parts.keys() - ignored),
        f"misplaced by {INDEX}": misplaced,
        "of another shape": shapes,
        "of an unsupported dtype": dtypes,
    }
    told = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
    if told:
        raise ValueError(f"{what}: its tensors do not fit its config.json; {told}")


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _fetch(checkpoint: Checkpoint, files: list[str]) -> None:
    """Download those of `files` that the hub has; nothing for a local folder."""
    if checkpoint.revision is not None:
        _download(checkpoint.name, checkpoint.revision, files)


def _download(name: str, revision: str | None, files: list[str]) -> Path:
    # Imported here: it reads its environment when imported, and a local folder does without it.
    from huggingface_hub import constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE
    patterns = [glob.escape(file) for file in files]
    try:
        # Offline must be said: else it wants the file list of a commit, which a cache may lack.
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=offline
            )
        )
    except Exception as error:  # its HTTP client's errors come through too, and share no base
        raise ValueError(f"{name!r} {_explain(error, revision)}") from error
    if offline and not any((folder / file).exists() for file in files):
        raise ValueError(f"{name!r} {OFFLINE}")
    return folder


def _explain(error: BaseException, revision: str | None) -> str:
    """What follows the name: why a download failed, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        if error.__cause__ is None:
            return OFFLINE
        error = error.__cause__  # why the hub could not be asked
    if isinstance(error, errors.HFValidationError):
        return "is neither a folder nor a hub id such as Qwen/Qwen3-8B: check the path"
    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its page on the hub, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is no folder here, and not on the hub: check the name (private: set HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}: check the branch, tag or commit"
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return f"could not be downloaded ({reason}): try again; what has arrived is kept"
