"""The text that a model reads while it is looked at, as its tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mhckit.train.tokenizer import Bytes, Tokenizer, load_tokenizer

from .source import Source

CHARACTERS_PER_TOKEN = 32  # that are read at most
SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class Reading:
    """Tokens [B, S], the beginning of their text, where it is from, and how it became tokens."""

    tokens: Tensor
    beginning: str
    origin: str
    tokenized: str
    _tokenizer_file: Path | None
    _folded: bool

    def text_of(self, index: int) -> str:
        """One token as text; nothing where a token does not stand for a text."""
        token = int(self.tokens.flatten()[index])
        if self._folded:
            return ""
        if self._tokenizer_file is None:
            return bytes([token]).decode("utf-8", "backslashreplace")
        import tokenizers

        return str(tokenizers.Tokenizer.from_file(str(self._tokenizer_file)).decode([token], skip_special_tokens=False))


def read(source: Source, *, file: Path | None, tokenizer: Path | None, count: int) -> Reading:
    """At most `count` tokens of a text file, in sequences that are no longer than the model is used to.

    Without a file: a module of Python's standard library, which begins with prose and goes on with code.
    """
    if count < 2:
        raise ValueError(f"tokens must be at least 2, one to read and one to predict, got {count}")
    path = tokenizer or source.tokenizer
    encoder = load_tokenizer(path)
    text = _text(Path(heapq.__file__) if file is None else file, count * CHARACTERS_PER_TOKEN)
    tokens = _encoded(encoder, text)[:count]
    if len(tokens) < 2:
        raise ValueError(f"the text must have 2 tokens or more, got {len(tokens)} from {file}")
    folded = int(tokens.max()) >= source.vocab_size
    length = min(source.longest or len(tokens), len(tokens))
    tokens = (tokens % source.vocab_size)[: len(tokens) // length * length]
    guessed = tokenizer is None and not source.tokenizer_known
    return Reading(
        tokens=tokens.reshape(-1, length),
        beginning=text[:SHOWN_CHARACTERS],
        origin="heapq.py of Python's standard library" if file is None else str(file),
        tokenized=_how(encoder, path, source.vocab_size, guessed, folded),
        _tokenizer_file=path,
        _folded=folded,
    )


def _text(file: Path, characters: int) -> str:
    if not file.is_file():
        raise ValueError(f"the text must be a file, and there is no {file}")
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(f"the text must be UTF-8, and {file} is not: {error}") from error


def _encoded(encoder: Tokenizer, text: str) -> Tensor:
    on_disk = encoder.encode(text.encode())
    if not on_disk:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(on_disk), dtype=encoder.dtype).long()


def _how(encoder: Tokenizer, path: Path | None, vocab_size: int, guessed: bool, folded: bool) -> str:
    how = "bytes" if isinstance(encoder, Bytes) else f"tokenizer {path}"
    if guessed:
        how += ", for no tokenizer was found: the model did not learn from these, and its loss says nothing"
    return how + (f"; taken modulo the vocabulary of {vocab_size}" if folded else "")
