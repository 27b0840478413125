"""The library's front door."""

import json
from typing import Any

import pytest
import torch

from nanodflash import LLM, SamplingParams
from nanodflash.engine.metrics import Metrics

PROMPTS = [[5, 9, 300], [7], [*range(30, 45)]]
FEW = SamplingParams(max_new_tokens=7)
WARM = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(pair: Any) -> Any:
    with LLM(pair.worded, pair.draft, dtype="fp64", block_size=8) as made:
        yield made


# ---------------------------------------------------------------------- generate, stream, chat


def test_one_prompt_and_many(llm: Any, expect: Any) -> None:
    many = llm.generate(PROMPTS, WARM)
    assert [out.token_ids for out in many] == [expect(prompt, WARM)[0] for prompt in PROMPTS]
    alone = [llm.generate(prompt, WARM) for prompt in PROMPTS]
    assert [len(outs) for outs in alone] == [1, 1, 1]
    assert [outs[0].token_ids for outs in alone] == [out.token_ids for out in many]
    assert [out.metrics.prompt_tokens for out in many] == [3, 1, 15]
    assert llm.generate(tuple(PROMPTS[0]), WARM)[0].token_ids == many[0].token_ids


def test_texts_and_ids_mix(llm: Any, expect: Any) -> None:
    outs = llm.generate(["b0 c0", [1, 2], "b0 c0 d0"], [WARM, WARM, FEW])
    assert outs[0].token_ids == outs[1].token_ids == expect([1, 2], WARM)[0]
    assert outs[2].token_ids == expect([1, 2, 3], FEW, eos=llm.eos_token_ids)[0]
    assert outs[0].text == llm.tokenizer.decode(outs[0].token_ids) != ""


def test_params_may_be_left_out(llm: Any, expect: Any) -> None:
    """Then they are the defaults: greedy, 256 tokens, the model's end ids."""
    out = llm.generate([*range(240)])[0]
    assert (out.token_ids, out.finish_reason) == expect(
        [*range(240)], SamplingParams(), eos=llm.eos_token_ids
    )


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("prompt", [PROMPTS[0], "b0 c0"])
def test_a_stream_is_generate_in_chunks(llm: Any, prompt: Any, speculate: bool) -> None:
    out = llm.generate(prompt, WARM, speculate)[0]
    chunks = list(llm.stream(prompt, WARM, speculate))
    assert [token for chunk in chunks for token in chunk.token_ids] == out.token_ids
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == out.finish_reason == "length"
    assert all(chunk.metrics is None for chunk in chunks[:-1])
    last = chunks[-1].metrics
    assert last.emitted == out.metrics.emitted
    assert len(chunks) == 1 + last.cycles
    assert all(len(chunk.accepted) == len(chunk.token_ids) > 0 for chunk in chunks)
    assert chunks[0].accepted == [False]
    assert sum(flag for chunk in chunks for flag in chunk.accepted) == last.accepted


def test_speculation_off_proposes_nothing(llm: Any) -> None:
    on, off = (llm.generate(PROMPTS[0], WARM, speculate)[0] for speculate in (True, False))
    assert on.token_ids == off.token_ids
    assert on.metrics.proposed == on.metrics.cycles * 7
    assert (off.metrics.proposed, off.metrics.accepted, off.metrics.tau) == (0, 0, 1.0)
    assert off.metrics.cycles == len(off.token_ids) - 1


def test_chat(llm: Any) -> None:
    messages = [{"role": "user", "content": "b0"}, {"role": "user", "content": "c0"}]
    assert llm.render(messages) == "b0 c0 z2"
    assert llm.render(messages, enable_thinking=True) == "b0 c0 z1"
    for thinking, last in ((False, 77), (True, 51)):
        out = llm.chat(messages, WARM, enable_thinking=thinking)
        assert out.token_ids == llm.generate([1, 2, last], WARM)[0].token_ids
        off = llm.chat(messages, WARM, speculate=False, enable_thinking=thinking)
        assert off.token_ids == out.token_ids
        assert off.metrics.proposed == 0
    with pytest.raises(ValueError, match="messages"):
        llm.chat("b0", WARM)


def test_no_tokenizer_no_text(open_llm: Any, expect: Any) -> None:
    llm = open_llm()
    assert llm.tokenizer is None
    out = llm.generate(PROMPTS[0], FEW)[0]
    assert (out.text, out.token_ids) == ("", expect(PROMPTS[0], FEW)[0])


# ---------------------------------------------------------------------- close


def test_a_closed_one_raises(pair: Any) -> None:
    llm = LLM(pair.worded, None)
    llm.generate([3], FEW)
    for _ in range(2):
        llm.close()
        for use in (
            lambda: llm.generate([3], FEW),
            lambda: llm.stream([3], FEW),
            lambda: llm.chat([{"role": "user", "content": "a1"}], FEW),
            lambda: llm.page_stats(),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                use()


def test_the_context_closes(pair: Any) -> None:
    with LLM(pair.target, None) as llm:
        assert llm.generate([3], FEW)[0].finish_reason == "length"
    with pytest.raises(RuntimeError, match="closed"):
        llm.page_stats()
    with pytest.raises(KeyError), LLM(pair.target, None) as llm:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        llm.page_stats()


# ---------------------------------------------------------------------- what is refused


def test_unknown_keywords(pair: Any, llm: Any) -> None:
    for call in (
        lambda: LLM(pair.target, pair.draft, blocksize=4),
        lambda: LLM(pair.target, pair.draft, 4),
        lambda: SamplingParams(max_tokens=4),
        lambda: llm.generate([3], FEW, temperature=1.0),
        lambda: llm.stream([3], max_new_tokens=4),
        lambda: llm.chat([{"role": "user", "content": "a1"}], thinking=True),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("device", ["tpu", "meta", "mps", "", "gpu", "cpu:x"])
def test_devices_that_are_refused(pair: Any, device: str) -> None:
    with pytest.raises(ValueError, match="device is"):
        LLM(pair.target, pair.draft, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(pair: Any) -> None:
    with pytest.raises(ValueError, match="no CUDA"):
        LLM(pair.target, pair.draft, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "fp16", "", "FP32"])
def test_dtypes_that_are_refused(pair: Any, dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype is"):
        LLM(pair.target, pair.draft, dtype=dtype)


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp64"])
def test_dtypes(pair: Any, dtype: str) -> None:
    with LLM(pair.target, pair.draft, dtype=dtype, device="cpu") as llm:
        names = {"auto": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
        assert llm.dtype == names.get(dtype, torch.float64)
        decoder = llm.engine.runner.steps.decoder
        held = [*decoder.target.parameters(), *decoder.draft.parameters()]
        held += [decoder.target_pool.rows, decoder.draft_pool.rows]
        assert {tensor.dtype for tensor in held} == {llm.dtype}
        for params in (FEW, WARM):
            ids = llm.generate(PROMPTS[0], params)[0].token_ids
            assert len(ids) == params.max_new_tokens
            assert all(0 <= token < 320 for token in ids)


MISMATCHES = {
    "hidden_size": {"hidden_size": 32},
    "vocab_size": {"vocab_size": 330},
    "num_target_layers": {"num_target_layers": 5},
    "mask_token_id": {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0, 2]}},
}


@pytest.mark.parametrize("key", MISMATCHES)
def test_a_pair_that_does_not_match(pair: Any, key: str) -> None:
    """Refused with the key's name, and before weights are read: there are none."""
    target = pair.variant(pair.target, "target without weights", weights=False)
    draft = pair.variant(pair.draft, f"other {key}", weights=False, **MISMATCHES[key])
    with pytest.raises(ValueError, match=key):
        LLM(target, draft)


def test_weights_that_are_not_there(pair: Any) -> None:
    target = pair.variant(pair.target, "target without weights", weights=False)
    draft = pair.variant(pair.draft, "draft without weights", weights=False)
    for models in ((target, pair.draft), (pair.target, draft), (target, draft)):
        with pytest.raises(ValueError, match="safetensors"):
            LLM(*models)


def test_a_target_is_no_drafter(pair: Any) -> None:
    with pytest.raises(ValueError, match="DFlashDraftModel"):
        LLM(pair.target, pair.target)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        LLM(pair.draft, None)


# ---------------------------------------------------------------------- block size, proposer


def test_the_block_size(open_llm: Any, pair: Any) -> None:
    assert open_llm().config.block_size == 16
    assert open_llm(block_size=5).config.block_size == 5
    with LLM(pair.target, None) as llm:
        assert llm.config.block_size == 1
    with LLM(pair.target, block_size=1) as llm:
        assert llm.config.block_size == 1
    for options, told in (
        ({"block_size": 4}, "no drafter"),
        ({"proposer": lambda tokens, length: tokens[:, :3]}, "needs block_size"),
        ({"proposer": lambda tokens, length: tokens[:, :0], "block_size": 1}, "block_size"),
    ):
        with pytest.raises(ValueError, match=told):
            LLM(pair.target, None, **options)
    with pytest.raises(ValueError, match=r"block_size is 17.*at most 16"):
        LLM(pair.target, pair.draft, block_size=17)


@pytest.mark.parametrize("with_draft", [True, False])
def test_a_proposer_replaces_the_ids(pair: Any, expect: Any, with_draft: bool) -> None:
    """It sees the tokens so far, the last emitted one at `len`."""
    size, prompt = 4, PROMPTS[0]
    text = [*prompt, *expect.ids(prompt, WARM, 20)]
    calls: list[int] = []

    def propose(tokens: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[0] == length.shape[0] == 1
        at = int(length[0])
        assert tokens[0, : at + 1].tolist() == text[: at + 1]
        calls.append(at)
        return torch.tensor([text[at + 1 : at + size]])

    options = {"dtype": "fp64", "proposer": propose, "block_size": size}
    with LLM(pair.target, pair.draft if with_draft else None, **options) as llm:
        out = llm.generate(prompt, WARM)[0]
        assert out.token_ids == expect(prompt, WARM)[0]
        # 12 = 1 + 4 + 4 + 3
        assert calls == [3, 7, 11]
        assert (out.metrics.tau, out.metrics.proposed, out.metrics.accepted) == (11 / 3, 9, 9)
        calls.clear()
        assert llm.generate(prompt, WARM, speculate=False)[0].token_ids == out.token_ids
        assert calls == []


# ---------------------------------------------------------------------- metrics


def test_metrics_add_up(llm: Any, scripted: Any) -> None:
    engine = scripted(8)
    parts = [
        engine.run(prompt, SamplingParams(max_new_tokens=new), pattern).metrics
        for prompt, new, pattern in zip(
            PROMPTS, (12, 1, 9), ("third wrong", "right", "wrong"), strict=True
        )
    ]
    whole = parts[0] + parts[1] + parts[2]
    for name in ("prompt_tokens", "cycles", "proposed", "accepted", "decoded_tokens"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert whole.prompt_tokens == 19
    assert whole.decoded_tokens == 11 + 0 + 8
    assert whole.cycles == 4 + 0 + 8  # 3 + 3 + 3 + 2, then one by one
    assert whole.tau == 19 / 12
    assert whole.accepted_at == [4, 4]
    assert whole.proposed_at == [12] * 7
    assert whole.acceptance_rate == 8 / (12 * 7)
    assert whole.acceptance_per_position == [4 / 12, 4 / 12, 0, 0, 0, 0, 0]
    assert whole.prefill_seconds == pytest.approx(sum(part.prefill_seconds for part in parts))
    assert whole.tokens_per_second == pytest.approx(19 / whole.decode_seconds)
    swapped = parts[2] + (parts[0] + parts[1])
    assert (swapped.emitted, swapped.accepted_at) == (whole.emitted, whole.accepted_at)
    assert parts[0].cycles == 4, "adding changes neither"
    listed = json.loads(json.dumps(whole.as_dict()))
    assert listed["tau"] == whole.tau
    assert listed["emitted_histogram"] == {"1": 8, "2": 1, "3": 3}


def test_metrics_of_nothing() -> None:
    none = Metrics()
    assert (none.tau, none.acceptance_rate, none.tokens_per_second) == (0, 0, 0)
    assert none.acceptance_per_position == []
    assert json.dumps((none + none).as_dict())
