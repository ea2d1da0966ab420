"""From text to tokens as they lie on disk."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import Any, Protocol

import torch

# What tokenizers call the token between documents, the first that exists.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "<eos>", "</s>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """What a corpus needs to know: how many tokens there are, and the tokens of a text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def key(self) -> str:
        """The same for two tokenizers that give the same tokens."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the tokens on disk."""
        ...

    @property
    def separator(self) -> bytes:
        """What comes after each document, on disk."""
        ...

    def encode(self, text: bytes) -> bytes:
        """The tokens of UTF-8 text, as the bytes of their dtype."""
        ...


class Bytes:
    """Every byte is a token. NUL, which is in no text, ends a document: 256 tokens in all."""

    vocab_size = 256
    key = "bytes"
    dtype = torch.uint8
    separator = b"\0"

    def encode(self, text: bytes) -> bytes:
        return text


class FromFile:
    """A tokenizer that the library ``tokenizers`` wrote as JSON, with its own separator if it has one."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise ValueError(f"tokenizer must be a JSON file of the library tokenizers, and there is no {file}")
        self._tokenizer = _parse(file)
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary:
            raise ValueError(f"the tokenizer in {file} has no tokens")
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.key = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        self.dtype, self._typecode = _narrowest(self.vocab_size)
        separators = [vocabulary[token] for token in SEPARATORS if token in vocabulary]
        self.separator = self._on_disk(separators[:1])

    def encode(self, text: bytes) -> bytes:
        return self._on_disk(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)

    def _on_disk(self, tokens: list[int]) -> bytes:
        return array(self._typecode, tokens).tobytes()


def load_tokenizer(file: Path | None) -> Tokenizer:
    """The tokenizer in a file; None is that of bytes."""
    return Bytes() if file is None else FromFile(file)


def _parse(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("a tokenizer file needs the library tokenizers: pip install 'mhckit[train]'") from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{file} is not a JSON file of the library tokenizers: {error}") from error


def _narrowest(vocab_size: int) -> tuple[torch.dtype, str]:
    """The dtype of tokens and its name in `array`: one that torch can index with on every version."""
    if vocab_size <= 1 << 8:
        return torch.uint8, "B"
    return (torch.int16, "h") if vocab_size <= 1 << 15 else (torch.int32, "i")
