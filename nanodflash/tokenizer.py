"""Text in, text out: the tokenizer, the model's own chat template, incremental decoding.

The engine itself sees ids only. `StreamDecoder` runs in the bookkeeping thread, one a sequence.
Source: tokenizer.json, tokenizer_config.json and chat_template.jinja of the checkpoint.
"""

import codecs
import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanodflash.config import short


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ):
        """Take a tokenizer of the library, a template and its variables ({"eos_token": ...})."""
        backend.no_truncation()  # a tokenizer.json may ask for both: ids must be the whole text
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint's tokenizer.json and, where they exist, the two files of its template.

        Raises:
            ValueError: tokenizer.json is missing, or a file is not what it should be.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer.json in {folder}: copy the one of the checkpoint there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong
            raise ValueError(f"{path} is not a valid tokenizer file: {error}") from error

        config_file = folder / "tokenizer_config.json"
        config = _read_json(config_file)
        special_tokens = {
            name: _special_token(token, f"{config_file}: {name}")
            for name in ("bos_token", "eos_token", "pad_token")
            if (token := config.get(name)) is not None
        }
        template = _template_of(config.get("chat_template"), f"{config_file}: chat_template")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template = read_text(template_file)
        return cls(backend, template, special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the embedding table may have more rows."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`: nothing is added, special tokens written in it are recognised."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # what the library also says of a lone surrogate
            _check_unicode(text)
            raise ValueError(f"a text is {short(text)}, wanted a string") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: special tokens and ids without a token are skipped."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, None for one that `decode` skips."""
        return None if token_id in self._special_ids else self.backend.id_to_token(token_id)

    @cached_property
    def spellings(self) -> "Spellings":
        """Bytes of every token of a byte-level vocabulary."""
        return Spellings(self)

    def chat(self, messages: list[dict[str, Any]], enable_thinking: bool = False) -> str:
        """Render a conversation with the model's own template, up to where the model answers.

        Args:
            messages: dicts with the strings "role" and "content"; other keys are handed on.
        Returns:
            The prompt, for `encode`.
        Raises:
            ValueError: no template, messages of another form, or the template fails.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: use a raw prompt")
        listed = messages if isinstance(messages, list) else []
        if not listed or not all(_has_strings(message, "role", "content") for message in listed):
            raise ValueError(
                "messages must be a non-empty list of dicts with the strings 'role' and 'content', "
                f"e.g. [{{'role': 'user', 'content': 'Hi'}}]; got {short(messages)}"
            )
        for message in messages:  # while the text is the user's own, without the template's
            _check_unicode(message["content"])
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                enable_thinking=enable_thinking,
                **self.special_tokens,
            )
        except Exception as error:  # the template is foreign code: it may raise anything
            raise ValueError(f"the model's chat template failed: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template, in the environment that templates on the hub are written for."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # jinja2's own filter escapes HTML
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")


class Spellings(dict[int, bytes]):
    """Id -> its bytes in a byte-level vocabulary, none for a token that `decode` skips; kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._piece = tokenizer.piece

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece(token_id) or ""
        try:
            self[token_id] = bytes(_BYTE_OF[char] for char in piece)
        except KeyError:  # an added token, written in plain text
            self[token_id] = piece.encode()
        return self[token_id]


class StreamDecoder:
    """Decode one sequence as its tokens arrive, and find its stop strings.

    Without a stop, the pushes and `finish` together give `tokenizer.decode` of all ids, exactly.

    Attributes:
        stopped:    the stop string found, else None. It and what follows are not in the text.
        num_tokens: tokens kept: all that were pushed, or those up to the one that completed
                    the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self.stopped: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop = stop
        self._held = ""  # settled text that may still become a stop string
        # Byte-level tokens are bytes, whatever their neighbours are.
        self._byte_level = isinstance(tokenizer.backend.decoder, tokenizers.decoders.ByteLevel)
        self._spellings = tokenizer.spellings
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Other decoders strip the start of a text, so later tokens are decoded behind the head:
        # the first tokens that gave text.
        self._head: list[int] = []
        self._head_text = ""
        self._pending: list[int] = []  # tokens whose text is not settled

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens, one or many, and return the text that is now safe to show.

        Args:
            ids: the next tokens of the sequence. Those behind a stop string are dropped.
        Returns:
            Whole characters that later tokens cannot change or turn into a stop string.
        """
        if self._byte_level and not self._stop:  # nothing to look for between two tokens
            self.num_tokens += len(ids)
            return self._utf8.decode(b"".join(map(self._spellings.__getitem__, ids)))
        shown = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if self._byte_level:
                step = self._utf8.decode(self._spellings[token_id])
            else:
                step = self._step(token_id, self._tokenizer.piece(token_id))
            shown.append(self._release(self._held + step))
        return "".join(shown)

    def finish(self) -> str:
        """The rest, once no token follows; incomplete bytes as `decode` shows them."""
        if self.stopped is not None:
            return ""
        rest = self._held + self._utf8.decode(b"", final=True) + self._pending_text()
        self._held, self._pending = "", []
        return rest

    def _step(self, token_id: int, piece: str | None) -> str:
        """The text that a token settles, for decoders that are not byte-level."""
        if piece is None:
            return ""
        self._pending.append(token_id)
        # A run of byte tokens is open until another token ends it: one bad byte makes all of them
        # U+FFFD. A stop string settles it at once, since what follows is dropped.
        is_byte = piece.startswith("<0x")
        if is_byte and not self._stop:
            return ""
        text = self._pending_text()
        is_open = is_byte or text.endswith("\ufffd")
        if not text or (is_open and self._find_stop(self._held + text) is None):
            return ""
        if not self._head:
            self._head, self._head_text = self._pending, text
        self._pending = []
        return text

    def _pending_text(self) -> str:
        """The text of the pending tokens as it stands now."""
        return self._tokenizer.decode(self._head + self._pending)[len(self._head_text) :]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string in `text` starts, and which it is."""
        return min(((text.find(stop), stop) for stop in self._stop if stop in text), default=None)

    def _release(self, text: str) -> str:
        """Split unshown text into what can be shown and what is held back for a stop string."""
        found = self._find_stop(text)
        if found is not None:
            start, self.stopped = found
            return text[:start]
        held = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        cut = len(text) - max(held, default=0)
        self._held = text[cut:]
        return text[:cut]


# The byte behind each character of a byte-level vocabulary: printable bytes stand for themselves,
# the others are written as the characters from 256 on (GPT-2's `bytes_to_unicode`).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + rank): byte for rank, byte in enumerate(_OTHERS)}


def read_text(path: Path) -> str:
    """A file's text; ValueError names a file that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    text = read_text(path) if path.is_file() else "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_token(token: Any, what: str) -> str:
    """The text of a special token, which stands alone or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f'{what} is {short(token)}, wanted a string or {{"content": string}}')
    return text


def _template_of(given: Any, what: str) -> str | None:
    """The chat template: the one there is, or the one named "default"."""
    named = [{"name": "default", "template": given}] if isinstance(given, str) else given or []
    if not (isinstance(named, list) and all(_has_strings(n, "name", "template") for n in named)):
        wanted = 'a string or a list of {"name": string, "template": string}'
        raise ValueError(f"{what} is {short(given)}, wanted {wanted}")
    return {entry["name"]: entry["template"] for entry in named}.get("default")


def _check_unicode(text: str) -> None:
    """ValueError for a text with a lone surrogate, which has no UTF-8; it shows where."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(error.start - 30, 0) : error.start + 30]
        raise ValueError(f"a text must be valid Unicode, got {near!r}") from error


def _has_strings(value: object, *keys: str) -> bool:
    """Whether it is a dict with strings at these keys."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in keys)


def _raise_exception(message: str) -> None:
    """What a template calls to refuse a conversation."""
    raise jinja2.TemplateError(message)
