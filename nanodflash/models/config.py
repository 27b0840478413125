"""What a checkpoint is: the geometry of target and drafter.

Field names are the keys of `config.json`, so that a reader of one can read the other. What a
checkpoint asks for and the code does not do is refused here, by name, before any weight is read.
No torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Every rope type the code does, and the parameters it cannot do without.
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
# Optional parameters of the types above; no other key of `config.json` bears on RoPE.
_ROPE_KEYS = {key for keys in _ROPE_REQUIRED.values() for key in keys} | {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
# What the code does is rotate-half over the whole head; these say otherwise, but for the values.
_ROPE_REFUSED = {
    "partial_rotary_factor": (None, 1.0),
    "is_neox_style": (None, True),
    "mrope_section": (None,),
}


def _positive(value: Any, key: str, what: str, whole: bool = False) -> None:
    """ValueError unless `value` is a finite number above 0, or a whole one."""
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        wanted = "a whole number" if whole else "a number"
        raise ValueError(f"{what}: {key} is {value!r} in config.json, wanted {wanted} above 0")


def _object(config: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    """The object at `key`, empty where there is none."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {key} is {value!r} in config.json, wanted an object")
    return value


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling type and that type's parameters.

    Source: `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`.
    """

    rope_theta: float
    rope_type: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], what: str) -> "RopeConfig":
        """Read the rotary keys of a `config.json`; ValueError for a type the code does not do."""
        merged = _object(config, "rope_scaling", what) | _object(config, "rope_parameters", what)
        theta = merged.pop("rope_theta", config.get("rope_theta"))
        new_key, old_key = merged.pop("rope_type", None), merged.pop("type", None)
        rope_type = new_key or old_key or "default"
        if not isinstance(rope_type, str) or rope_type not in _ROPE_REQUIRED:
            known = ", ".join(_ROPE_REQUIRED)
            raise ValueError(f"{what}: rope_type {rope_type!r} is not supported (known: {known})")
        merged = {**config, **merged}
        for key, neutral in _ROPE_REFUSED.items():
            if merged.get(key) not in neutral:
                raise ValueError(f"{what}: {key} = {merged[key]!r} is not supported")
        _positive(theta, "rope_theta", what)
        for key in _ROPE_REQUIRED[rope_type]:
            _positive(merged.get(key), f"{key} (of rope_type {rope_type!r})", what)
        return cls(float(theta), rope_type, {k: merged[k] for k in _ROPE_KEYS if k in merged})


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The geometry that target and draft share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig


def _geometry(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Check the keys of `TransformerConfig` and return them as keyword arguments."""
    values: dict[str, Any] = {}
    for key in (f.name for f in fields(TransformerConfig) if f.name != "rope"):
        _positive(config.get(key), key, what, whole=key != "rms_norm_eps")
        values[key] = config[key]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"{what}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if values["head_dim"] % 2:
        raise ValueError(f"{what}: head_dim {values['head_dim']} is odd; RoPE needs pairs")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{what}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    for key in ("attention_bias", "mlp_bias", "quantization_config", "compression_config"):
        if config.get(key):
            raise ValueError(f"{what}: {key} is not supported, got {config[key]!r}")
    return values | {"rope": RopeConfig.from_dict(config, what)}


def _check_architecture(config: Mapping[str, Any], wanted: str, what: str) -> None:
    got = config.get("architectures")
    if got != [wanted]:
        raise ValueError(f"{what}: architectures is {got!r}, wanted [{wanted!r}]")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """A dense Qwen3 target. Source: its `config.json`."""

    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], what: str = "target") -> "TargetConfig":
        """Read a `config.json`; ValueError names the first key that is missing or not supported."""
        _check_architecture(config, "Qwen3ForCausalLM", what)
        layer_types = config.get("layer_types") or []
        if config.get("use_sliding_window"):
            raise ValueError(f"{what}: use_sliding_window is not supported in a target")
        if any(kind != "full_attention" for kind in layer_types):
            raise ValueError(f"{what}: layer_types {layer_types!r} is not supported in a target")
        tied = config.get("tie_word_embeddings", False)
        return cls(**_geometry(config, what), tie_word_embeddings=bool(tied))


# Keys that change the arithmetic of a drafter and that v1 does not have. A value in the second
# column is the neutral one and passes.
_DRAFT_REFUSED = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "projector_type": (None, "dflash"),
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "sample_from_anchor": (None, False),
    "use_swa": (None, False),
    "mask_token": (None,),
    "conv_kernel_size": (None,),
    "selector_top_k": (None,),
}


@dataclass(frozen=True, kw_only=True)
class DraftConfig(TransformerConfig):
    """A DFlash v1 drafter. Source: its `config.json` (dflash.md 1.2)."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]  # per layer: sliding window in keys, None = full attention
    causal: tuple[bool, ...]  # per layer: block rows see only the rows before them

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], what: str = "draft") -> "DraftConfig":
        """Read a `config.json`; ValueError names the first key that is missing or not supported."""
        _check_architecture(config, "DFlashDraftModel", what)
        nested = _object(config, "dflash_config", what)

        def read(key: str) -> Any:
            return nested[key] if key in nested else config.get(key)

        def required_int(key: str, smallest: int) -> int:
            value = read(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ValueError(
                    f"{what}: config.json needs {key} (in dflash_config or at top level), "
                    f"a whole number >= {smallest}, got {value!r}"
                )
            return value

        for key, neutral in _DRAFT_REFUSED.items():
            if read(key) not in neutral:
                raise ValueError(f"{what}: {key} = {read(key)!r} is not supported")
        geometry = _geometry(config, what)
        num_target_layers = required_int("num_target_layers", 1)
        layers = geometry["num_hidden_layers"]
        windows = _draft_windows(config, layers, what)
        rule = nested.get("causal") if config.get("is_causal") is None else config["is_causal"]
        if rule not in (None, True, False):
            raise ValueError(f"{what}: is_causal is {rule!r}, wanted true or false")
        return cls(
            **geometry,
            block_size=required_int("block_size", 2),
            mask_token_id=required_int("mask_token_id", 0),
            target_layer_ids=_target_layer_ids(read("target_layer_ids"), num_target_layers, what),
            num_target_layers=num_target_layers,
            windows=windows,
            causal=tuple(window is not None if rule is None else bool(rule) for window in windows),
        )


def _target_layer_ids(ids: Any, num_target_layers: int, what: str) -> tuple[int, ...]:
    """The taps in listed order. They are fixed by training and never guessed."""
    whole = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
    if not whole or len(set(ids)) != len(ids) or not all(0 <= i < num_target_layers for i in ids):
        raise ValueError(
            f"{what}: config.json needs target_layer_ids, a list of distinct layers in "
            f"0..{num_target_layers - 1}, got {ids!r}"
        )
    return tuple(ids)


def _draft_windows(config: Mapping[str, Any], layers: int, what: str) -> tuple[int | None, ...]:
    layer_types = config.get("layer_types") or ["full_attention"] * layers
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != layers:
        raise ValueError(
            f"{what}: layer_types wants {layers} entries of full_attention or sliding_attention, "
            f"got {layer_types!r}"
        )
    window = config.get("sliding_window")
    if "sliding_attention" in layer_types:
        _positive(window, "sliding_window", what, whole=True)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """ValueError unless this drafter was made for a target of this shape."""
    for key, wanted, got in (
        ("hidden_size", target.hidden_size, draft.hidden_size),
        ("vocab_size", target.vocab_size, draft.vocab_size),
        ("num_target_layers", target.num_hidden_layers, draft.num_target_layers),
    ):
        if wanted != got:
            raise ValueError(
                f"the drafter does not belong to this target: its {key} is {got}, "
                f"the target's is {wanted}"
            )
    if draft.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"draft: mask_token_id {draft.mask_token_id} lies outside the target's table of "
            f"{target.vocab_size} rows"
        )
