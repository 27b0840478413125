"""Pages that a GPU has room for, and what is said where there is none."""

from typing import Any

import pytest
import torch

import kit
from nanodflash import LLM, options
from nanodflash.config import EngineConfig
from nanodflash.engine.memory import FIXED, GIB, page_bytes, pages_that_fit, weight_count
from nanodflash.models.config import DraftConfig, TargetConfig

TARGET = TargetConfig.from_dict(kit.TARGET)
DRAFT = DraftConfig.from_dict(kit.DRAFT)
CONFIG = EngineConfig(max_model_len=512, block_size=8, page_size=16, max_seqs=4)
TIED: Any = {"tie_word_embeddings": True}


@pytest.mark.parametrize("changes", [{}, TIED, {"num_key_value_heads": 4}], ids=str)
def test_the_weights_of_a_target(changes: Any) -> None:
    model = kit.make_target(**changes)
    assert weight_count(model.config) == sum(p.numel() for p in {*model.parameters()})


def test_the_weights_of_a_drafter() -> None:
    """And the context side, once more."""
    model = kit.make_draft()
    model.freeze()
    assert model.context is not None
    held = [*model.parameters(), *model.context]
    assert weight_count(model.config) == sum(tensor.numel() for tensor in held)


def test_a_page() -> None:
    """In both pools: 2 * layers * heads * dim * places."""
    assert page_bytes([TARGET, DRAFT], 16, 2) == 2 * (4 + 2) * 2 * 32 * 16 * 2
    from nanodflash.decoding.kv_cache import KVPool

    pools = [KVPool(config, 5, 16, torch.zeros(1)) for config in (TARGET, DRAFT)]
    assert page_bytes([TARGET, DRAFT], 16, 4) == sum(pool.rows.nbytes for pool in pools) // 6


def fits(free: float, total: float = 80, utilization: float = 1.0, **changes: Any) -> int:
    config = EngineConfig(**{**vars(CONFIG), **changes})
    given = (int(free * GIB), int(total * GIB), utilization)
    return pages_that_fit(*given, TARGET, DRAFT, config, 2)


def test_all_slots_where_there_is_room() -> None:
    assert fits(70) == CONFIG.total_pages == 4 * 33 + 1
    assert fits(70, max_seqs=64) == 64 * 33 + 1


def test_what_is_left_is_filled() -> None:
    """More slots than there is room for: the pool is what is left, to the page."""
    page = page_bytes([TARGET, DRAFT], 16, 2)
    wide = {"max_seqs": 4096, "max_model_len": 100_000}
    some = fits(12, **wide)
    assert some < 4096 * 6251
    assert fits(12 + 100.5 * page / GIB, **wide) - some in (100, 101)
    # others' memory counts: of 80 GiB three quarters are 60, of which 20 may be another's
    assert fits(40, utilization=0.75, **wide) == fits(20, utilization=1.0, **wide)


def test_no_room_is_one_line_that_says_what_to_lower() -> None:
    with pytest.raises(ValueError, match="lower max_model_len or max_seqs, or raise gpu_mem"):
        fits(FIXED / GIB)


def test_where_the_figures_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    cuda, half = torch.device("cuda:0"), torch.bfloat16
    given = (TARGET, DRAFT, CONFIG)
    assert options.num_pages_of(None, 0.9, *given, cuda, half) == CONFIG.total_pages
    assert options.num_pages_of(7, 0.9, *given, cuda, half) == 7
    assert options.num_pages_of(None, 0.9, *given, torch.device("cpu"), half) is None


@pytest.mark.parametrize("share", [0, -1, 1.1, "half", True, None])
def test_a_bad_share_is_refused(pair: Any, share: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization is"):
        LLM(pair.target, pair.draft, gpu_memory_utilization=share)


def test_memory_that_runs_out_while_loading(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("nanodflash.llm.load_model", fails)
    with pytest.raises(ValueError, match="no room for models and pages: lower gpu_memory_util"):
        LLM(pair.target, pair.draft)


def test_memory_that_runs_out_in_a_step(scripted: Any, expect: Any) -> None:
    """Its requests end with a line that says what to lower; the next one runs."""
    from nanodflash import SamplingParams

    engine, params = scripted(8), SamplingParams(max_new_tokens=20)
    engine.prepare([5, 6], params, "right")

    def fails(tokens: Any, length: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    engine.script = fails
    with pytest.raises(MemoryError, match="a step of 1 blocks and 0 prompt tokens: lower gpu_mem"):
        engine.llm.generate([5, 6], params)
    assert engine.run([5, 6], params).token_ids == expect([5, 6], params)[0]
