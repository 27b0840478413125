"""Train a DFlash drafter for a target: published loss, anchors and mask.

Source: DFlash (arXiv 2602.06036), training; dflash.md 4.1. The target's features are computed on
the way: it is frozen, and one forward of it is small beside the drafter's many blocks.
"""

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from nanodflash.checkpoint import load_model, open_checkpoint, save_model
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.layers import Heads
from nanodflash.models.qwen3 import Qwen3
from nanodflash.ops import Rotary, split_heads
from nanodflash.tokenizer import read_text
from nanodflash.train import corpus
from nanodflash.train.answers import own_answers
from nanodflash.train.data import Document, encode_prompt
from nanodflash.train.loop import Trainer
from nanodflash.train.target import DenseMemory, initialise

DOCUMENTS, ANCHORS = 8, 24  # of one step
DECAY = {16: 7.0, 10: 5.0, 8: 4.0}  # gamma by block size, as published
HELD_OUT = 128


class BlockMemory:
    """Blocks at random anchors, each seeing the context before its anchor and itself.

    A `Memory` and a `Writer` for training: `inject` takes the context rows [R, T], `attend` the
    rows of R * A blocks. Blocks do not see each other, so scores against the context are one
    product per document, scores inside blocks one per block.

    Args:
        anchors: [R, A] int64, positions of the anchors.
        length:  T, context rows.
    """

    def __init__(self, anchors: Tensor, length: int) -> None:
        later = torch.arange(length) >= anchors[..., None]  # strictly before the anchor
        mask = torch.zeros(later.shape).masked_fill(later, float("-inf"))
        self.mask = mask[:, :, None, None, None]  # [R, A, Hkv, S, G, T]
        self.context: dict[int, tuple[Tensor, Tensor]] = {}

    def inject(self, kv: Tensor, k_norms: Tensor, eps: float, rotary: Rotary) -> None:
        """kv [R, T, L, 2 Hkv, D] of the context."""
        for layer, k_norm in enumerate(k_norms):
            own = kv[..., layer, :, :]
            _, k, v = split_heads(own, k_norm, k_norm, eps, rotary, own.shape[-2] // 2)
            self.context[layer] = (k, v)

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Rows [R, A, S] -> [R, A, S, Hq, D]."""
        past_k, past_v = self.context[layer]
        q, k, v = heads.split()
        group, dim = q.shape[3] // k.shape[3], q.shape[-1]
        q = q.unflatten(3, (-1, group)) * dim**-0.5  # [R, A, S, Hkv, G, D]
        past = torch.einsum("raskgd,rtkd->raksgt", q, past_k)
        past = past + self.mask
        own = torch.einsum("raskgd,rapkd->raksgp", q, k)
        weights = torch.cat([past, own], -1).softmax(-1)
        past, own = weights.split([past.shape[-1], own.shape[-1]], -1)
        out = torch.einsum("raksgt,rtkd->raskgd", past, past_v)
        out = out + torch.einsum("raksgp,rapkd->raskgd", own, v)
        return out.flatten(3, 4)


class Blocks(NamedTuple):
    """One step's blocks."""

    ids: Tensor  # [R, T] documents, padded on the right
    anchors: Tensor  # [R, A]
    labels: Tensor  # [R, A, S-1], -100 past the end of the answer


def draw_blocks(documents: list[Document], size: int, rng: random.Random) -> Blocks:
    """Random anchors in the answers of some documents; every anchor has a label after it."""
    longest = max(len(d.ids) for d in documents)
    ids = torch.zeros(len(documents), longest + size, dtype=torch.int64)
    labels = torch.full((len(documents), longest + size), -100)
    anchors = torch.empty(len(documents), ANCHORS, dtype=torch.int64)
    for row, (tokens, answer) in enumerate(documents):
        ids[row, : len(tokens)] = labels[row, : len(tokens)] = torch.tensor(tokens)
        anchors[row] = torch.tensor(
            [rng.randrange(answer, len(tokens) - 1) for _ in range(ANCHORS)]
        )
    places = anchors[..., None] + torch.arange(1, size)
    rows = torch.arange(len(documents))[:, None, None]
    return Blocks(ids[:, :longest], anchors, labels[rows, places])


def block_logits(draft: DFlash, target: Qwen3, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Logits of the labelled rows [n, V], and which rows they are [R, A, S-1] bool."""
    ids, anchors, labels = blocks
    config = draft.config
    with torch.no_grad():
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        _, features = target(ids, positions, DenseMemory(), config.target_layer_ids)
        mask = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
        mask[..., 0] = ids.gather(1, anchors)
        embedded = target.embed(mask)
    assert features is not None
    memory = BlockMemory(anchors, ids.shape[1])
    draft.inject(features, positions, memory)
    places = anchors[..., None] + torch.arange(config.block_size)
    hidden = draft(embedded, places, memory)
    labelled = labels >= 0
    return target.logits(hidden[:, :, 1:][labelled]), labelled


def block_loss(draft: DFlash, target: Qwen3, blocks: Blocks) -> Tensor:
    """Cross-entropy weighted by exp(-(k-1)/gamma) at block position k, as a weighted mean."""
    logits, labelled = block_logits(draft, target, blocks)
    size = draft.config.block_size
    decay = torch.exp(-torch.arange(size - 1) / DECAY.get(size, size * 7 / 16))
    weights = decay.expand_as(labelled)[labelled]
    losses = F.cross_entropy(logits, blocks.labels[labelled], reduction="none")
    return (losses * weights).sum() / weights.sum()


def mean_run(draft: DFlash, target: Qwen3, blocks: Blocks) -> float:
    """Tokens a cycle at these anchors would emit, for anchors with half a block of labels left.

    It runs above the tau of real decoding, whose last cycle is cut.
    """
    logits, labelled = block_logits(draft, target, blocks)
    right = torch.zeros_like(labelled)
    right[labelled] = logits.argmax(-1) == blocks.labels[labelled]
    enough = labelled.sum(-1) >= draft.config.block_size // 2
    return right.to(torch.int64).cumprod(-1).sum(-1)[enough].float().mean().item() + 1


def train_draft(
    target: str,
    out: Path,
    minutes: float,
    answers: int,
    seed: int,
    layers: int,
    taps: int,
    block_size: int,
    prompts: Path | None,
) -> None:
    """Make the target's answers, train on them, write a checkpoint folder; run again to resume.

    Args:
        target:  folder or hub id; it must bring a tokenizer.json.
        out:     folder of the checkpoint; `out/.train` holds answers and resumable state.
        answers: training prompts to answer.
        layers:  draft layers.  taps: how many of the target's layers are tapped.
        prompts: a file with a prompt a line, instead of the corpus generator's.
    """
    torch.manual_seed(seed)
    checkpoint = open_checkpoint(target)
    target_config = TargetConfig.from_dict(checkpoint.config, target)
    model = load_model(Qwen3, target_config, checkpoint, torch.device("cpu"), torch.float32)
    model.prepare(target_config.max_position_embeddings)
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    config = draft_config(checkpoint.config, tokenizer, layers, taps, block_size)
    draft = DFlash(DraftConfig.from_dict(config))
    initialise(draft)
    draft.norm.data.copy_(model.norm)  # the head was trained for rows of this scale
    draft.prepare(target_config.max_position_embeddings)

    work = out / ".train"
    work.mkdir(parents=True, exist_ok=True)
    texts = _prompts(prompts, answers, seed)
    documents = _documents(work / "answers.json", target, tokenizer, texts, seed)
    held_out, training = documents[:HELD_OUT], documents[HELD_OUT:]
    if not training:
        raise ValueError(
            f"{work / 'answers.json'} holds {len(documents)} answers of two tokens or more, wanted "
            f"more than {HELD_OUT}: raise --answers, in a fresh folder"
        )
    # The target is the drafter's embedding and head, and frozen: it is no part of the module.
    trainer = Trainer(draft, draft.parts(), work, minutes, flat=0.4)
    rng = random.Random(seed + trainer.step)
    check = draw_blocks(held_out, block_size, random.Random(1))
    feed = _groups(training, rng)

    def loss_of(step: int) -> tuple[Tensor, int]:
        blocks = draw_blocks(next(feed), block_size, rng)
        return block_loss(draft, model, blocks), blocks.anchors.numel()

    @torch.no_grad()
    def validate() -> str:
        return f"held-out mean run {mean_run(draft, model, check):.3f}"

    trainer.run(loss_of, validate)
    save_model(out, draft, config)
    (out / "training.json").write_text(json.dumps(trainer.history, indent=1) + "\n")


def draft_config(
    target: dict[str, Any], tokenizer: Tokenizer, layers: int, taps: int, block_size: int
) -> dict[str, Any]:
    """A drafter of the target's widths, taps spread from layer 1 to the third last."""
    depth = target["num_hidden_layers"]
    span = range(taps)
    ids = [round(1 + i * (depth - 4) / max(taps - 1, 1)) for i in span]
    if len(set(ids)) != taps or not 0 <= min(ids) <= max(ids) < depth:
        raise ValueError(f"{taps} taps do not fit a target of {depth} layers")
    mask = tokenizer.token_to_id("<|mask|>")
    if mask is None:
        mask = tokenizer.get_vocab_size()  # the first padding row, as the public drafters do
        if mask >= target["vocab_size"]:
            raise ValueError("the target's table has neither a <|mask|> token nor a padding row")
    shared: dict[str, Any] = {
        key: target[key]
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "max_position_embeddings",
            "attention_bias",
            "dtype",
        )
        if key in target
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **shared,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
    }


def _prompts(path: Path | None, count: int, seed: int) -> list[str]:
    """Prompts to answer; the first `HELD_OUT` are kept for checking."""
    if path is not None:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        if len(lines) <= HELD_OUT:
            raise ValueError(f"{path} has {len(lines)} prompts, wanted more than {HELD_OUT}")
        return lines[: count + HELD_OUT]
    kept = [problem.prompt for problem in corpus.held_out(HELD_OUT, seed=2)]
    return kept + [problem.prompt for problem in islice(corpus.stream(seed + 1), count)]


def _documents(
    path: Path, target: str, tokenizer: Tokenizer, texts: list[str], seed: int
) -> list[Document]:
    """Prompts with the target's answers; made once, then read."""
    if not path.exists():
        prompts = [encode_prompt(tokenizer, text) for text in texts]
        replies = own_answers(target, prompts, seed)
        pairs = [(p + r, len(p)) for p, r in zip(prompts, replies, strict=True)]
        path.write_text(json.dumps(pairs))
    documents = [Document(ids, answer) for ids, answer in json.loads(path.read_text())]
    return [d for d in documents if len(d.ids) - d.answer > 1]


def _groups(documents: list[Document], rng: random.Random) -> Iterator[list[Document]]:
    """Endless groups of `DOCUMENTS` documents of like length."""
    while True:
        rng.shuffle(documents)
        for first in range(0, len(documents), 64 * DOCUMENTS):
            pool = sorted(documents[first : first + 64 * DOCUMENTS], key=lambda d: len(d.ids))
            groups = [pool[i : i + DOCUMENTS] for i in range(0, len(pool), DOCUMENTS)]
            rng.shuffle(groups)
            yield from groups
