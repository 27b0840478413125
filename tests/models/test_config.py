"""Configurations: published files are read as meant, what cannot run is refused by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kit import DRAFT, TARGET
from nanodflash.models.config import DraftConfig, RopeConfig, TargetConfig, check_pair

ABSENT = object()  # as a value: the key is taken out
NAN, INF = float("nan"), float("inf")
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "target": (TargetConfig.from_dict, TARGET),
    "draft": (DraftConfig.from_dict, DRAFT),
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of a `config.json` with other values, and without the keys that are ABSENT."""
    return {key: value for key, value in (config | changes).items() if value is not ABSENT}


def target(**changes: Any) -> TargetConfig:
    return TargetConfig.from_dict(changed(TARGET, **changes))


def draft(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict(changed(DRAFT, **changes))


def nested(**changes: Any) -> dict[str, Any]:
    """`dflash_config` with changes."""
    return changed(DRAFT["dflash_config"], **changes)


# ---------------------------------------------------------------------- published files

QWEN3_8B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
  "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
QWEN3_8B_DFLASH = """{
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "num_target_layers": 36,
  "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
  "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
  "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": null,
  "max_position_embeddings": 40960,
  "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention"],
  "sliding_window": null, "use_sliding_window": false, "attention_bias": false,
  "vocab_size": 151936, "tie_word_embeddings": false, "dtype": "bfloat16"
}"""
QWEN36_27B_DFLASH = """{
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "num_target_layers": 64,
  "dflash_config": {"block_size": 16, "mask_token_id": 248070,
    "target_layer_ids": [1, 16, 31, 46, 61]},
  "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
  "rms_norm_eps": 1e-06, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
  "max_position_embeddings": 262144,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
    "sliding_attention", "full_attention"],
  "sliding_window": 2048, "use_sliding_window": true, "attention_bias": false,
  "vocab_size": 248320, "tie_word_embeddings": false, "dtype": "bfloat16"
}"""


def test_qwen3_8b_and_its_drafter() -> None:
    big = TargetConfig.from_dict(json.loads(QWEN3_8B))
    assert big == TargetConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        tie_word_embeddings=False,
    )
    small = DraftConfig.from_dict(json.loads(QWEN3_8B_DFLASH))
    assert small == DraftConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        windows=(None,) * 5,
        causal=(False,) * 5,
    )
    check_pair(big, small)


def test_qwen36_27b_drafter() -> None:
    config = DraftConfig.from_dict(json.loads(QWEN36_27B_DFLASH))
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.causal == (True, True, True, True, False)
    assert config.target_layer_ids == (1, 16, 31, 46, 61)
    assert (config.block_size, config.mask_token_id) == (16, 248070)
    assert (config.num_target_layers, config.hidden_size) == (64, 5120)
    assert config.rope == RopeConfig(1e7)


# ---------------------------------------------------------------------- what both models share

WHOLE = [key for key, value in vars(target()).items() if type(value) is int]


ROTATIONS = ("partial_rotary_factor", "is_neox_style", "mrope_section")


@pytest.mark.parametrize("which", MODELS)
class TestShared:
    """Refusals of the geometry, in a target's file and in a drafter's."""

    def refuse(self, which: str, name: str, **changes: Any) -> None:
        read, base = MODELS[which]
        with pytest.raises(ValueError, match=rf"{which}: .*{name}"):
            read(changed(base, **changes))

    @pytest.mark.parametrize("key", [*WHOLE, "rms_norm_eps", "rope_theta", "architectures"])
    def test_missing(self, which: str, key: str) -> None:
        self.refuse(which, key, **{key: ABSENT})

    @pytest.mark.parametrize("key", WHOLE)
    @pytest.mark.parametrize("value", [0, -1, 2.5, True, False, None, "64", [64], {}])
    def test_not_whole(self, which: str, key: str, value: Any) -> None:
        self.refuse(which, key, **{key: value})

    @pytest.mark.parametrize("value", [64.0, NAN, INF])
    def test_not_whole_either(self, which: str, value: Any) -> None:
        self.refuse(which, "hidden_size", hidden_size=value)

    @pytest.mark.parametrize(
        "value",
        [0, 0.0, -1e-6, True, None, "1e-6", [1e-6], NAN, INF],
    )
    def test_eps(self, which: str, value: Any) -> None:
        self.refuse(which, "rms_norm_eps", rms_norm_eps=value)

    @pytest.mark.parametrize("value", [None, 0, -1, NAN, INF, True, "x", [1]])
    def test_theta(self, which: str, value: Any) -> None:
        self.refuse(which, "rope_theta", rope_theta=value)

    @pytest.mark.parametrize(("heads", "kv"), [(4, 3), (2, 4), (5, 2)])
    def test_heads(self, which: str, heads: int, kv: int) -> None:
        self.refuse(which, "num_key_value_heads", num_attention_heads=heads, num_key_value_heads=kv)

    def test_odd_head(self, which: str) -> None:
        self.refuse(which, "head_dim", head_dim=33)

    @pytest.mark.parametrize("value", ["gelu", "relu", None])
    def test_activation(self, which: str, value: Any) -> None:
        self.refuse(which, "hidden_act", hidden_act=value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attention_bias", True),
            ("mlp_bias", True),
            ("quantization_config", {"quant_method": "fp8"}),
            ("compression_config", {"format": "int-quantized"}),
        ],
    )
    def test_not_done(self, which: str, key: str, value: Any) -> None:
        self.refuse(which, key, **{key: value})

    @pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
    @pytest.mark.parametrize("value", [False, None])
    def test_neutral(self, which: str, key: str, value: Any) -> None:
        read, base = MODELS[which]
        assert read(changed(base, **{key: value})) == read(base)

    @pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
    def test_no_quantization(self, which: str, key: str) -> None:
        read, base = MODELS[which]
        assert read(changed(base, **{key: None})) == read(base)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            [],
            "Qwen3ForCausalLM",
            ["Qwen3MoeForCausalLM"],
            ["Qwen3_5ForConditionalGeneration"],
            ["DFlash2DraftModel"],
            ["Qwen3ForCausalLM", "DFlashDraftModel"],
        ],
    )
    def test_architecture(self, which: str, value: Any) -> None:
        self.refuse(which, "architectures", architectures=value)

    @pytest.mark.parametrize("kind", ["longrope", "proportional", "su", "mrope", 5])
    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_rope_type(self, which: str, kind: Any, key: str) -> None:
        self.refuse(which, f"rope_type {kind!r}", rope_scaling={key: kind, "factor": 2.0})
        self.refuse(which, f"rope_type {kind!r}", rope_parameters={key: kind, "factor": 2.0})

    @pytest.mark.parametrize(
        ("kind", "key"),
        [
            ("linear", "factor"),
            ("dynamic", "factor"),
            ("yarn", "factor"),
            ("llama3", "factor"),
            ("llama3", "low_freq_factor"),
            ("llama3", "high_freq_factor"),
            ("llama3", "original_max_position_embeddings"),
        ],
    )
    def test_rope_parameter(self, which: str, kind: str, key: str) -> None:
        full = {
            "rope_type": kind,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        read, base = MODELS[which]
        assert read(changed(base, rope_parameters=full)).rope.rope_type == kind
        self.refuse(which, key, rope_parameters=changed(full, **{key: ABSENT}))

    @pytest.mark.parametrize("value", [None, 0, "4", True, NAN])
    def test_rope_factor(self, which: str, value: Any) -> None:
        self.refuse(which, "factor", rope_scaling={"type": "linear", "factor": value})

    @pytest.mark.parametrize(
        "changes",
        [
            {"partial_rotary_factor": 0.5},
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            {"rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]}},
            {"is_neox_style": False},
        ],
    )
    def test_other_rotations(self, which: str, changes: dict[str, Any]) -> None:
        self.refuse(which, f"({'|'.join(ROTATIONS)})", **changes)

    def test_whole_rotation(self, which: str) -> None:
        read, base = MODELS[which]
        changes = {"partial_rotary_factor": 1.0, "is_neox_style": True}
        assert read(changed(base, **changes)) == read(base)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        {
            "rope_theta": ABSENT,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
        },
        {
            "rope_theta": 1.0,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500000, "factor": 4.0},
        },
    ],
)
def test_rope_spellings(changes: dict[str, Any]) -> None:
    assert target(**changes).rope == RopeConfig(5e5, "yarn", {"factor": 4.0})


# ---------------------------------------------------------------------- target


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 128},
        {"layer_types": [FULL] * 3 + [SLIDING]},
        {"layer_types": ["linear_attention"] * 4},
    ],
)
def test_target_refuses_windows(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"use_sliding_window|layer_types"):
        target(**changes)


def test_target_accepts_full_attention() -> None:
    changes = {"use_sliding_window": False, "sliding_window": 4096}
    assert target(layer_types=[FULL] * 4, **changes) == target()
    assert target(tie_word_embeddings=True).tie_word_embeddings
    assert not target(tie_word_embeddings=ABSENT).tie_word_embeddings
