"""How many pages a GPU has room for. No torch: what is free is asked elsewhere."""

import math

from nanodflash.config import EngineConfig
from nanodflash.engine.width import bucket
from nanodflash.models.config import DraftConfig, TargetConfig, TransformerConfig

GIB = 2**30
FIXED = 1 * GIB  # captured graphs, libraries' workspaces, fragments


def weight_count(config: TransformerConfig) -> int:
    """Parameters of a model; for a drafter also its context side, which is kept twice."""
    hidden, dim = config.hidden_size, config.head_dim
    kv = 2 * config.num_key_value_heads * dim * hidden
    layer = 2 * config.num_attention_heads * dim * hidden + kv + 2 * dim + 2 * hidden
    layer += 3 * hidden * config.intermediate_size
    if isinstance(config, DraftConfig):
        taps = len(config.target_layer_ids) * hidden * hidden
        return config.num_hidden_layers * (layer + kv + dim) + taps + 2 * hidden
    assert isinstance(config, TargetConfig)
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden


def page_bytes(configs: list[TransformerConfig], page_size: int, itemsize: int) -> int:
    """Of one page in all pools."""
    places = sum(c.num_hidden_layers * c.num_key_value_heads * c.head_dim for c in configs)
    return 2 * places * page_size * itemsize


def workspace_bytes(
    target: TargetConfig, draft: DraftConfig | None, config: EngineConfig, itemsize: int
) -> int:
    """What the widest step needs beside weights and pages: logits, activations, history."""
    rows = bucket(config.max_seqs) * config.block_size
    # Logits, and what becomes of them in fp32 and int32 where a request asks for penalties.
    logits = rows * target.vocab_size * (itemsize + 26)
    state = (config.max_seqs + 1) * (5 * target.vocab_size + 8 * config.max_model_len)
    tapped = len(draft.target_layer_ids) if draft else 0
    columns = 3 * target.intermediate_size + (8 + 2 * tapped) * target.hidden_size
    return FIXED + logits + state + (config.max_prefill + rows) * columns * itemsize


def pages_that_fit(
    free: int,
    total: int,
    utilization: float,
    target: TargetConfig,
    draft: DraftConfig | None,
    config: EngineConfig,
    itemsize: int,
) -> int:
    """Pages for the pools: what is left of a device's memory, at most what all slots can use.

    Args:
        free, total: bytes of the device, before anything is loaded.
        utilization: share of the total that may be used, others' part included.
        itemsize:    bytes of a number.
    Raises:
        ValueError: there is no room for one full sequence.
    """
    configs = [target, *([draft] if draft else [])]
    weights = sum(map(weight_count, configs)) * itemsize
    workspace = workspace_bytes(target, draft, config, itemsize)
    left = free - (1 - utilization) * total - weights - workspace
    pages = math.floor(left / page_bytes(configs, config.page_size, itemsize))
    least = config.pages_per_seq + 1
    if pages < least:
        wanted = least * page_bytes(configs, config.page_size, itemsize)
        raise ValueError(
            f"the GPU has {free / GIB:.1f} of {total / GIB:.1f} GiB free; weights take "
            f"{weights / GIB:.1f}, steps {workspace / GIB:.1f} and one sequence of "
            f"{config.max_model_len} tokens {wanted / GIB:.1f}: lower max_model_len or max_seqs, "
            f"or raise gpu_memory_utilization ({utilization})"
        )
    return min(pages, config.max_seqs * config.pages_per_seq + 1)
