"""What an LLM's options mean for these models on this machine: device, sizes, operations."""

import gc
import os
import shutil
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from nanodflash import ops
from nanodflash.config import EngineConfig, check_int, check_number, short
from nanodflash.decoding.cycle import Proposer
from nanodflash.engine.memory import pages_that_fit
from nanodflash.models.config import DraftConfig, TargetConfig

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
CPU_MODEL_LEN = 4096
TRITON = (3, 6)  # what the kernels were written for, and newer


def device_of(name: str) -> torch.device:
    """The device; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, wanted auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, wanted auto, cpu or cuda")
    if device.type == "cuda" and torch.cuda.is_available() and device.index is None:
        # The current device is a thread's own: it must be the caller's, not the engine's.
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch sees no CUDA device here")
    return device


def overlaps(wanted: bool | str, device: torch.device) -> bool:
    """Whether to launch ahead; "auto" does on CUDA."""
    if wanted == "auto":
        return device.type == "cuda"
    if not isinstance(wanted, bool):
        raise ValueError(f"overlap is {wanted!r}, wanted auto, True or False")
    return wanted


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype; "auto" is fp32 on a CPU, bf16 on CUDA."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}, wanted auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def model_len(wanted: int | None, target: TargetConfig, device: torch.device) -> int:
    """Prompt and new tokens of a request; None is the target's limit, less on a CPU."""
    limit = target.max_position_embeddings
    if target.rope.rope_type == "dynamic":  # the base would change with the length beyond this
        limit = min(limit, target.rope.parameters.get("original_max_position_embeddings", limit))
    if wanted is None:
        return min(limit, CPU_MODEL_LEN) if device.type == "cpu" else limit
    check_int("max_model_len", wanted, 2, limit)
    return wanted


def block_size_of(wanted: int | None, draft: DraftConfig | None, proposer: Proposer | None) -> int:
    """S: the drafter's, or less; without one the proposer's, or 1."""
    if draft is None and proposer is None:
        if wanted not in (None, 1):
            raise ValueError(f"block_size is {wanted!r}, but there is no drafter to fill a block")
        return 1
    if draft is None:
        if wanted is None:
            raise ValueError("a proposer without a drafter needs block_size")
        check_int("block_size", wanted, 2)
        return wanted
    if wanted is None:
        return draft.block_size
    check_int("block_size", wanted, 2, draft.block_size)
    return wanted


def verify_width_of(wanted: int | str, block_size: int, device: torch.device) -> int | None:
    """A fixed width of verification, or None for one that is measured.

    "auto" measures on CUDA. On a CPU it is the whole block: what is measured depends on the
    machine's other work, and near ties then fall as it goes.
    """
    if wanted == "measure" or (wanted == "auto" and device.type == "cuda"):
        return None
    if wanted == "auto":
        return block_size
    if isinstance(wanted, str):
        raise ValueError(f"verify_width is {wanted!r}, wanted auto, measure or a whole number")
    check_int("verify_width", wanted, 1, block_size)
    return wanted


def num_pages_of(
    wanted: int | None,
    utilization: float,
    target: TargetConfig,
    draft: DraftConfig | None,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> int | None:
    """Pages of each pool: what is asked for, else what a GPU has room for."""
    check_number("gpu_memory_utilization", utilization, lambda x: 0 < x <= 1, "above 0, at most 1")
    if wanted is not None or device.type != "cuda":
        return wanted
    gc.collect()  # an LLM before this one
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return pages_that_fit(free, total, utilization, target, draft, config, dtype.itemsize)


def choose_ops(
    reference: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    target: TargetConfig,
    draft: DraftConfig | None,
) -> ops.Ops:
    """The kernels on CUDA, but the definitions of what is named; where they cannot run, all."""
    if isinstance(reference, str) or not all(name in ops.NAMES for name in reference):
        known = ", ".join(ops.NAMES)
        raise ValueError(f"reference_ops is {short(reference)}, wanted names of {known}")
    if device.type != "cuda":
        return ops.REFERENCE
    dims = {config.head_dim for config in (target, draft) if config is not None}
    missing = _missing(dtype, dims)
    if missing is not None:
        warnings.warn(f"the reference operations run, slowly: {missing}", stacklevel=3)
        return ops.REFERENCE
    return ops.kernel_ops(tuple(reference))


def _missing(dtype: torch.dtype, head_dims: set[int]) -> str | None:
    """What the kernels need and do not have."""
    if dtype == torch.float64:
        return "the kernels have no fp64"
    odd = [dim for dim in head_dims if dim not in (16, 32, 64, 128)]
    if odd:
        return f"the kernels need a head_dim of 16, 32, 64 or 128, got {odd[0]}"
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < TRITON:
        return f"Triton is {triton.__version__}, wanted {'.'.join(map(str, TRITON))} or newer"
    # It compiles a launcher for every kernel.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is neither gcc nor clang"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's headers (python3-dev), and there is no {header}"
    return None
