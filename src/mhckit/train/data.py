"""A corpus of tokens, memory-mapped from a cache on disk, and batches that are a pure function of the step.

    documents --digest--> cache/<digest>.tokens      found there, or made: tokenised once, renamed when whole
    tokens = train ... | validation                  the split depends on their number alone

The digest is of the contents of the documents and of the tokenizer: a change of either asks the cache for another file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .atomic import written_whole
from .sources import Document, find_documents, read_pieces
from .tokenizer import Tokenizer, load_tokenizer

FORMAT = "mhckit tokens 1"
LENGTH = struct.Struct("=q")
# One token in a hundred is for validation; of a short text more, up to a tenth.
VALIDATION_PART = 100
VALIDATION_MINIMUM, VALIDATION_PART_AT_MOST = 8192, 10


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from, and others to validate with: 1-D, memory-mapped, of an integer dtype."""

    train: Tensor
    validation: Tensor
    vocab_size: int
    digest: str

    def require(self, seq_len: int) -> None:
        """Raises ValueError if either part is too short for a sequence."""
        _count_sequences("train", self.train, seq_len)
        _count_sequences("validation", self.validation, seq_len)


def load_corpus(
    source: str | Path | None = None,
    *,
    tokenizer: str | Path | None = None,
    cache: str | Path,
    show_progress: bool = False,
) -> Corpus:
    """The tokens of a text file or of a folder of them.

    Args:
        source: a file, or a folder that is searched at all depths; documents are in the order of their names, each
            followed by a separator. None takes the sources of Python's standard library.
        tokenizer: a JSON file of the library ``tokenizers``. None takes bytes as tokens.
        cache: folder for the tokens. Any number of processes may use it at once.
        show_progress: with a bar, where rich is installed.
    """
    cache = Path(cache)
    documents = find_documents(None if source is None else Path(source), leave_out=cache)
    encoder = load_tokenizer(None if tokenizer is None else Path(tokenizer))
    digest = _digest(documents, encoder)
    file = cache / f"{digest}.tokens"
    length = _length(file, encoder) or _make(file, documents, encoder, show_progress)
    tokens = torch.from_file(str(file), shared=False, size=length, dtype=encoder.dtype)
    minimum = min(VALIDATION_MINIMUM, length // VALIDATION_PART_AT_MOST)
    split = length - max(length // VALIDATION_PART, minimum)
    return Corpus(tokens[:split], tokens[split:], encoder.vocab_size, digest)


def batch(
    tokens: Tensor, *, seq_len: int, batch_size: int, seed: int, step: int, rank: int = 0, world: int = 1
) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens that follow them, int64 [batch_size, seq_len] each.

    The tokens are cut into sequences, which come in random order; then they are cut elsewhere and come in another one,
    and so on: an epoch shows every sequence once. Which ones a batch has depends on the arguments alone; the batches of
    all ranks, one below the other, are the batch of one process that asks for world * batch_size.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("step", step, 0), ("world", world, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to world - 1 = {world - 1}, got {rank}")
    sequences = _count_sequences("the text", tokens, seq_len)
    spare = tokens.numel() - 1 - sequences * seq_len
    first = (step * world + rank) * batch_size
    windows = []
    for number in range(first, first + batch_size):
        epoch, position = divmod(number, sequences)
        shift, order = _order(sequences, spare, seed, epoch)
        start = shift + int(order[position]) * seq_len
        windows.append(tokens[start : start + seq_len + 1])
    window = torch.stack(windows).long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _count_sequences(name: str, tokens: Tensor, seq_len: int) -> int:
    """How many sequences an epoch has: all but one of those that fit, so that there is room to cut elsewhere."""
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    if tokens.numel() <= seq_len:
        raise ValueError(
            f"{name} must have seq_len + 1 = {seq_len + 1} tokens or more, got {tokens.numel()}: "
            "take a longer text or a shorter seq_len"
        )
    return max(1, (tokens.numel() - 1) // seq_len - 1)


@lru_cache(maxsize=4)
def _order(sequences: int, spare: int, seed: int, epoch: int) -> tuple[int, Tensor]:
    """Where an epoch's first sequence starts, and the order of them."""
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    shift = int(torch.randint(spare + 1, (), generator=generator))
    return shift, torch.randperm(sequences, generator=generator)


def _digest(documents: list[Document], tokenizer: Tokenizer) -> str:
    digests = "\n".join([FORMAT, tokenizer.key, *(document.digest for document in documents)])
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def _length(file: Path, tokenizer: Tokenizer) -> int | None:
    """How many tokens the file has; None if it is not there, or not whole: its last eight bytes must say the same."""
    if not file.is_file():
        return None
    length = (file.stat().st_size - LENGTH.size) // tokenizer.dtype.itemsize
    if length < 0:
        return None
    with file.open("rb") as tokens:
        tokens.seek(length * tokenizer.dtype.itemsize)
        return length if tokens.read() == LENGTH.pack(length) else None


def _make(file: Path, documents: list[Document], tokenizer: Tokenizer, show_progress: bool) -> int:
    """Tokenise into a file; where two processes do so at once, the file of the last, of equal contents, stays."""
    with (
        written_whole(file) as temporary,
        temporary.open("wb") as tokens,
        _progress(sum(document.size for document in documents), show_progress) as advance,
    ):
        for document in documents:
            for piece in read_pieces(document):
                tokens.write(tokenizer.encode(piece))
                advance(len(piece))
            tokens.write(tokenizer.separator)
        length = tokens.tell() // tokenizer.dtype.itemsize
        if not length:
            raise ValueError("the tokenizer makes no tokens of this text")
        tokens.write(LENGTH.pack(length))
    return length


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done."""
    if not shown or find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:-1], DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("tokenise", total=total)
        yield lambda done: bar.advance(task, done)
