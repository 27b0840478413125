"""Documents to batches: the bundled tokenizer, chat layout, one document a row."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from nanodflash.tokenizer import read_text

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
END, MASK = 2, 3
# Qwen's own split: contractions, words with a leading mark, single digits, marks, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with Qwen's split; ids 0..3 are `SPECIAL`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Document(NamedTuple):
    """Ids of one document; the answer (what the loss may be limited to) starts at `answer`."""

    ids: list[int]
    answer: int


def chat_document(tokenizer: Tokenizer, prompt: str, answer: str) -> Document:
    """A question and its answer in the chat layout, ended by `<|im_end|>`."""
    asked = encode_prompt(tokenizer, prompt)
    said = tokenizer.encode(answer, add_special_tokens=False).ids
    return Document([*asked, *said, END], len(asked))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a question in the chat layout: what `CHAT_TEMPLATE` renders."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids


def text_documents(tokenizer: Tokenizer, path: Path, length: int, seed: int) -> Iterator[Document]:
    """Endless random windows of a text file; every token counts."""
    ids = tokenizer.encode(read_text(path), add_special_tokens=False).ids
    if len(ids) <= length:
        raise ValueError(f"{path} holds {len(ids)} tokens, wanted more than {length}")
    rng = random.Random(seed)
    while True:
        start = rng.randrange(len(ids) - length)
        yield Document(ids[start : start + length], 1)


class Batch(NamedTuple):
    """Rows padded on the right. `labels[b, t]` is the token after `ids[b, t]`, or -100."""

    ids: Tensor  # [B, T]
    labels: Tensor  # [B, T]
    answers: Tensor  # [B, T] bool: labels inside the answer


def batches(documents: Iterator[Document], tokens: int, seed: int) -> Iterator[Batch]:
    """One document a row, rows of like length together, about `tokens` ids a batch.

    A model that may look into neighbouring documents learns to copy names and numbers from the
    question much later (docs/LOG.md); buckets keep the padding small.
    """
    rng = random.Random(seed)
    while True:
        pool = sorted((next(documents) for _ in range(512)), key=lambda d: len(d.ids))
        rows: list[list[Document]] = [[]]
        for document in pool:
            if (len(rows[-1]) + 1) * len(document.ids) > tokens and rows[-1]:
                rows.append([])
            rows[-1].append(document)
        rng.shuffle(rows)
        yield from map(collate, rows)


def collate(documents: list[Document]) -> Batch:
    """Pad documents on the right into one `Batch`."""
    longest = max(len(d.ids) for d in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    answers = torch.zeros(len(documents), longest, dtype=torch.bool)
    labels = torch.full((len(documents), longest), -100)
    for row, (tokens, answer) in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens) - 1] = ids[row, 1 : len(tokens)]
        answers[row, answer - 1 : len(tokens) - 1] = True
    return Batch(ids, labels, answers)
