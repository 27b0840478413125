"""Train a small Qwen3 target, from the corpus generator or from a text file."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from nanodflash.checkpoint import save_model
from nanodflash.models.config import TargetConfig
from nanodflash.models.layers import Heads
from nanodflash.models.qwen3 import Qwen3
from nanodflash.tokenizer import read_text
from nanodflash.train import corpus
from nanodflash.train.data import (
    CHAT_TEMPLATE,
    END,
    SPECIAL,
    Batch,
    Document,
    batches,
    chat_document,
    collate,
    text_documents,
    train_tokenizer,
)
from nanodflash.train.loop import Trainer

# Deep and narrow: two draft layers are then cheap beside it (docs/LOG.md).
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "eos_token_id": END,
    "dtype": "bfloat16",
}


class DenseMemory:
    """Causal attention inside each row and nothing else: no cache. A `Memory` for training."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Rows [B, T] -> [B, T, Hq, D]."""
        q, k, v = (x.transpose(1, 2) for x in heads.split())
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def initialise(module: torch.nn.Module) -> None:
    """Embeddings 0.02; matrices by their input width; what writes to the residual stream zero."""
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj", "down_proj")):
            torch.nn.init.zeros_(parameter)
        elif name.endswith(("embed_tokens", "lm_head")):
            torch.nn.init.normal_(parameter, std=0.02)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)


def target_loss(model: Qwen3, batch: Batch, counted: Tensor) -> Tensor:
    """Mean cross-entropy of the labels where `counted` [B, T]; the head runs on those rows only."""
    positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    hidden, _ = model(batch.ids, positions, DenseMemory())
    return F.cross_entropy(model.logits(hidden[counted]), batch.labels[counted])


def train_target(
    out: Path, minutes: float, seed: int, text: Path | None, vocab_size: int, tokens: int
) -> None:
    """Train, then write a checkpoint folder; run again to resume.

    Args:
        out:     folder of the checkpoint; `out/.train` holds the resumable state.
        text:    train on this file instead of the corpus generator.
        tokens:  ids a step.
    """
    torch.manual_seed(seed)
    work = out / ".train"
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(work / "tokenizer.json", text, vocab_size, seed)
    config = CONFIG | {"vocab_size": vocab_size}
    model = Qwen3(TargetConfig.from_dict(config))
    initialise(model)
    model.prepare(config["max_position_embeddings"])
    trainer = Trainer(model, model.parts(), work, minutes, flat=0.5)

    start = seed + trainer.step  # resumed: fresh documents, never the same ones again
    documents = (
        text_documents(tokenizer, text, 256, start)
        if text
        else _corpus_documents(tokenizer, corpus.stream(start))
    )
    feed = batches(documents, tokens, start)
    held_out = (
        list(islice(documents, 64))
        if text
        else list(_corpus_documents(tokenizer, iter(corpus.held_out(128, seed=1))))
    )
    check = collate(held_out)

    def loss_of(step: int) -> tuple[Tensor, int]:
        batch = next(feed)
        everything = batch.labels >= 0
        counted = everything if trainer.progress < 0.1 else batch.answers
        return target_loss(model, batch, counted), int(everything.sum())

    @torch.no_grad()
    def validate() -> str:
        return f"held-out answer loss {target_loss(model, check, check.answers).item():.4f}"

    trainer.run(loss_of, validate)
    save_model(out, model, config)
    _save_text_files(out, tokenizer)
    (out / "training.json").write_text(json.dumps(trainer.history, indent=1) + "\n")


def _corpus_documents(tokenizer: Tokenizer, problems: Iterator[Any]) -> Iterator[Document]:
    for problem in problems:
        yield chat_document(tokenizer, problem.prompt, problem.answer)


def _tokenizer(path: Path, text: Path | None, vocab_size: int, seed: int) -> Tokenizer:
    """The tokenizer of this run: made once, then read."""
    if not path.exists():
        if text:
            texts = iter([read_text(text)])
        else:
            texts = (f"{p.prompt}\n{p.answer}" for p in islice(corpus.stream(seed), 20_000))
        train_tokenizer(texts, vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} ids, wanted {vocab_size}")
    return tokenizer


def _save_text_files(out: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[END],
            "pad_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(out / "generation_config.json", {"eos_token_id": [END, 0]})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
