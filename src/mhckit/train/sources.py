"""Which text a corpus is made of: the files, their order, and what they contain.

Text is UTF-8 without NUL bytes. In a folder, files that are anything else are left out, as are hidden ones.
"""

from __future__ import annotations

import codecs
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 1 << 22
# Parts of the standard library's folder that are not the library, and its tests, many of them not meant to be read.
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One file, and a digest of what was in it when it was found."""

    path: Path
    size: int
    digest: str


def find_documents(source: Path | None, *, leave_out: Path) -> list[Document]:
    """The documents of a file or folder in the order of their names; None is Python's standard library.

    Nothing below the folder ``leave_out`` counts, so that a cache in the source folder is no part of the corpus.
    """
    if source is not None and source.is_file():
        return [_explicit_document(source)]
    if source is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = (path for path in folder.rglob("*.py") if not NOT_THE_LIBRARY & set(path.relative_to(folder).parts))
    elif source.is_dir():
        folder = source
        files = folder.rglob("*")
    else:
        raise ValueError(f"source must be a file or a folder of text, and there is no {source}")
    documents = [document for path in _visible(files, folder, leave_out) if (document := examine(path)) is not None]
    documents = [document for document in documents if document.size]
    if not documents:
        raise ValueError(f"no text in {folder}: no file there is UTF-8, not empty and not hidden")
    return documents


def examine(path: Path) -> Document | None:
    """The file as a document; None if it is not text."""
    digest, size = _new_digest(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            if b"\0" in chunk or not _decodes(decoder, chunk):
                return None
            digest.update(chunk)
            size += len(chunk)
    return Document(path, size, digest.hexdigest()) if _decodes(decoder, b"", final=True) else None


def read_pieces(document: Document) -> Iterator[bytes]:
    """The text in pieces of a few megabytes that end with a line, or where one is longer, with a character.

    Raises ValueError at the end if the file is no longer the one that was found: its tokens would carry a wrong digest.
    """
    digest, rest = _new_digest(), b""
    with document.path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            digest.update(chunk)
            rest += chunk
            if len(chunk) == PIECE_BYTES:  # a shorter one is the last, and ends nowhere but at the end
                end = _last_cut(rest)
                yield rest[:end]
                rest = rest[end:]
    yield rest
    if digest.hexdigest() != document.digest:
        raise ValueError(f"{document.path} changed while it was read: start again when it is finished")


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _explicit_document(path: Path) -> Document:
    document = examine(path)
    if document is None:
        raise ValueError(f"source must be UTF-8 text without NUL bytes, and {path} is not")
    if not document.size:
        raise ValueError(f"no text in {path}: the file is empty")
    return document


def _visible(files: Iterable[Path], folder: Path, leave_out: Path) -> list[Path]:
    def counts(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return not hidden and path.is_file() and leave_out.resolve() not in path.resolve().parents

    return sorted((path for path in files if counts(path)), key=lambda path: path.relative_to(folder).parts)


def _decodes(decoder: codecs.IncrementalDecoder, chunk: bytes, final: bool = False) -> bool:
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError:
        return False
    return True


def _last_cut(data: bytes) -> int:
    """Where to end a piece; continuation bytes of UTF-8 are 10xxxxxx."""
    end = data.rfind(b"\n") + 1
    if not end:
        end = len(data) - 1
        while end > 0 and data[end] & 0xC0 == 0x80:
            end -= 1
    return end
