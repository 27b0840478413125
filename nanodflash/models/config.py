"""What a checkpoint is: the geometry of target and drafter.

Field names are the keys of `config.json`, so that a reader of one can read the other. What a
checkpoint asks for and the code does not do is refused here, by name, before any weight is read.
No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nanodflash.config import check_int, check_number, short

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
# All parameters of the types above and what they must be; no other key of `config.json` bears on
# RoPE. Optional ones may be null.
_ROPE_KINDS = {
    "original_max_position_embeddings": "whole",
    "truncate": "flag",
    "mscale": "number or 0",
    "mscale_all_dim": "number or 0",
    "factor": "number",
    "low_freq_factor": "number",
    "high_freq_factor": "number",
    "attention_factor": "number",
    "beta_fast": "number",
    "beta_slow": "number",
}
# What the code does is rotate-half over the whole head; these say otherwise, but for the values.
_ROPE_REFUSED = {
    "partial_rotary_factor": (None, 1.0),
    "is_neox_style": (None, True),
    "mrope_section": (None,),
}
# Sizes are bounded so that what is made of them fits 64 bits, and a loop over layers ends.
_SIZE, _COUNT = 2**24, 2**10
_MOST = {
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
}


def _check(
    config: Mapping[str, Any], key: str, kind: str, what: str, least: int = 1, most: int = _SIZE
) -> Any:
    """The value of a key of `config.json`.

    Args:
        kind:  "whole", "number" (above 0), "number or 0" or "flag" (null is false).
        least, most: of a whole number.
    Raises:
        ValueError: it is of another kind, or beyond what arithmetic can take.
    """
    value: Any = config.get(key)
    name = f"{what}: {key} of config.json"
    if kind == "whole":
        check_int(name, value, least, most)
    elif kind == "flag":
        if not (value is None or isinstance(value, bool)):
            raise ValueError(f"{name} is {short(value)}, wanted true or false")
        value = bool(value)
    else:
        zero = kind == "number or 0"
        wanted = "a number above 0" + " or 0" * zero + " (1e-30 to 1e30)"
        check_number(name, value, lambda x: 1e-30 <= x <= 1e30 or (zero and x == 0), wanted)
        value = float(value)
    return value


def _object(config: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    """The object at `key`, empty where there is none."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{what}: {key} of config.json is {short(value)}, wanted an object")
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
            got = short(rope_type)
            raise ValueError(f"{what}: rope_type {got} is not supported (known: {known})")
        merged = {**config, **merged}
        for key, neutral in _ROPE_REFUSED.items():
            if merged.get(key) not in neutral:
                raise ValueError(f"{what}: {key} = {short(merged[key])} is not supported")
        theta = _check({"rope_theta": theta}, "rope_theta", "number", what)
        parameters: dict[str, Any] = {
            key: _check(merged, key, kind, what, least=2)
            for key, kind in _ROPE_KINDS.items()
            if merged.get(key) is not None or key in _ROPE_REQUIRED[rope_type]
        }
        if rope_type == "yarn" and theta <= 1:
            told = f"is {theta}, wanted above 1 (of rope_type 'yarn')"
            raise ValueError(f"{what}: rope_theta of config.json {told}")
        low, high = parameters.get("low_freq_factor", 0), parameters.get("high_freq_factor", 0)
        if rope_type == "llama3" and not low < high:
            told = f"is {low}, wanted below high_freq_factor ({high})"
            raise ValueError(f"{what}: low_freq_factor of config.json {told}")
        return cls(theta, rope_type, parameters)


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
        kind = "number" if key == "rms_norm_eps" else "whole"
        least = 2 if key == "max_position_embeddings" else 1  # a prompt's token and a new one
        values[key] = _check(config, key, kind, what, least, _MOST.get(key, _SIZE))
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"{what}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if values["head_dim"] % 2:
        raise ValueError(f"{what}: head_dim {values['head_dim']} is odd; RoPE needs pairs")
    if config.get("hidden_act", "silu") != "silu":
        got = short(config["hidden_act"])
        raise ValueError(f"{what}: hidden_act {got} is not supported, only silu")
    for key in ("attention_bias", "mlp_bias", "quantization_config", "compression_config"):
        if config.get(key):
            raise ValueError(f"{what}: {key} is not supported, got {short(config[key])}")
    return values | {"rope": RopeConfig.from_dict(config, what)}


def _check_architecture(config: Mapping[str, Any], wanted: str, what: str) -> None:
    got = config.get("architectures")
    if got != [wanted]:
        raise ValueError(f"{what}: architectures is {short(got)}, wanted [{wanted!r}]")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """A dense Qwen3 target. Source: its `config.json`."""

    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], what: str = "target") -> "TargetConfig":
        """Read a `config.json`; ValueError names the first key that is missing or not supported."""
        _check_architecture(config, "Qwen3ForCausalLM", what)
        geometry = _geometry(config, what)
        if _check(config, "use_sliding_window", "flag", what):
            raise ValueError(f"{what}: use_sliding_window is not supported in a target")
        _layer_types(config, geometry["num_hidden_layers"], ("full_attention",), what)
        tied = _check(config, "tie_word_embeddings", "flag", what)
        return cls(**geometry, tie_word_embeddings=tied)


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

        def required(key: str, least: int, most: int = _SIZE) -> int:
            """A whole number, in `dflash_config` or at top level."""
            return _check({key: read(key)}, key, "whole", what, least, most)

        for key, neutral in _DRAFT_REFUSED.items():
            if read(key) not in neutral:
                raise ValueError(f"{what}: {key} = {short(read(key))} is not supported")
        geometry = _geometry(config, what)
        num_target_layers = required("num_target_layers", 1, _COUNT)
        layers = geometry["num_hidden_layers"]
        windows = _draft_windows(config, layers, what)
        rule = nested.get("causal") if config.get("is_causal") is None else config["is_causal"]
        if rule not in (None, True, False):
            raise ValueError(f"{what}: is_causal is {short(rule)}, wanted true or false")
        return cls(
            **geometry,
            block_size=required("block_size", 2, _COUNT),
            mask_token_id=required("mask_token_id", 0),
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
            f"0..{num_target_layers - 1}, got {short(ids)}"
        )
    return tuple(ids)


def _layer_types(
    config: Mapping[str, Any], layers: int, known: tuple[str, ...], what: str
) -> list[str]:
    """`layer_types`, one for each layer; full attention where the key is absent."""
    kinds = config.get("layer_types")
    if kinds is None:
        return ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ValueError(
            f"{what}: layer_types of config.json is {short(kinds)}, "
            f"wanted a list of {layers} entries, each {' or '.join(known)}"
        )
    return kinds


def _draft_windows(config: Mapping[str, Any], layers: int, what: str) -> tuple[int | None, ...]:
    kinds = _layer_types(config, layers, ("full_attention", "sliding_attention"), what)
    sliding = "sliding_attention" in kinds
    window = _check(config, "sliding_window", "whole", what) if sliding else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


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
