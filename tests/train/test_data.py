"""The corpus: which text it holds, that its cache is made once and never stale, and batches by step alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mhckit.train import atomic, data, sources
from mhckit.train.data import Corpus, batch, load_corpus

TEXT = "Grüße, мир\n" * 40


def _all_tokens(corpus: Corpus) -> Tensor:
    return torch.cat([corpus.train, corpus.validation])


def _as_bytes(corpus: Corpus) -> bytes:
    return bytes(_all_tokens(corpus).tolist())


def _write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _write(tmp_path / "text", b=b"second\n", a__x=TEXT.encode(), a__deep__y=b"first\n", c__z=b"third")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words; 400 of them, so that a token needs more than a byte. Where it is asked to, it adds w9 at both ends."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(["[UNK]", "</s>", *(f"w{index}" for index in range(398))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="w9 $A w9", special_tokens=[("w9", 11)])
    path = tmp_path / "words.json"
    made.save(str(path))
    return path


def test_a_folder_is_its_documents_in_order(source: Path, cache: Path) -> None:
    corpus = load_corpus(source, tokenizer=None, cache=cache)
    assert _as_bytes(corpus) == b"first\n\0" + TEXT.encode() + b"\0second\n\0third\0"
    assert corpus.vocab_size == 256
    assert corpus.train.dtype == torch.uint8


def test_a_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(TEXT)
    assert _as_bytes(load_corpus(str(path), tokenizer=None, cache=cache)) == TEXT.encode() + b"\0"


def test_what_is_no_text_or_hidden_is_left_out(source: Path, cache: Path) -> None:
    before = _as_bytes(load_corpus(source, cache=cache))
    _write(source, a__latin="Grüße".encode("latin-1"), a__nul=b"text\0text", a__empty=b"")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("hidden")
    (source / ".hidden").write_text("hidden")
    (source / "broken").symlink_to(source / "nowhere")
    assert _as_bytes(load_corpus(source, cache=cache)) == before


def test_text_that_ends_within_a_character_is_none(source: Path, cache: Path) -> None:
    _write(source, a__half="ü".encode()[:1])
    assert b"\xc3\0" not in _as_bytes(load_corpus(source, cache=cache))


def test_the_cache_is_no_part_of_the_corpus(source: Path, tokenizer: Path) -> None:
    cache = source / "cache"
    first = load_corpus(source, cache=cache)
    (cache / "note.txt").write_text("not text to learn")
    assert load_corpus(source, cache=cache).digest == first.digest


def test_the_standard_library_is_the_default(cache: Path) -> None:
    corpus = load_corpus(cache=cache)
    text = _as_bytes(corpus)
    assert Path(multiprocessing.__file__).read_bytes() in text
    assert Path(subprocess.__file__).read_bytes() in text
    assert Path(pytest.__file__).read_bytes() not in text, "site-packages"
    assert b"import test.support" not in text, "the library's tests"
    assert len(text) > 5_000_000
    assert corpus.validation.numel() == len(text) // 100


def test_of_the_standard_library_only_the_library(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a.py", "b/c.py", "b/data.txt", "b/tests/d.py", "test/e.py", "site-packages/f.py", "dist-packages/g.py")
    for name in names:
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    assert _as_bytes(load_corpus(cache=cache)) == b"a.py\0b/c.py\0"


def test_tokenizer_file(tmp_path: Path, cache: Path, tokenizer: Path) -> None:
    source = _write(tmp_path / "text", a=b"w0 w397\nw5", b=b"w7 other")
    corpus = load_corpus(source, tokenizer=tokenizer, cache=cache)
    assert _all_tokens(corpus).tolist() == [2, 399, 7, 1, 9, 0, 1]
    assert (corpus.vocab_size, corpus.train.dtype) == (400, torch.int16)
    assert load_corpus(source, cache=cache).digest != corpus.digest


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, torch.uint8), (257, torch.int16), (1 << 15, torch.int16), (70000, torch.int32)]
)
def test_tokens_are_as_narrow_as_the_vocabulary_allows(
    tmp_path: Path, cache: Path, vocab_size: int, dtype: torch.dtype
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0} | {f"w{index}": index for index in range(1, vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    (tmp_path / "text").write_text(f"w{vocab_size - 1} w1")
    corpus = load_corpus(tmp_path / "text", tokenizer=tmp_path / "words.json", cache=cache)
    assert _all_tokens(corpus).tolist() == [vocab_size - 1, 1], "no token of this tokenizer separates documents"
    assert corpus.train.dtype == dtype


def test_long_files_are_cut_at_lines_or_characters(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 25)
    document = sources.examine(source / "a" / "x")
    assert document is not None
    pieces = list(sources.read_pieces(document))
    assert b"".join(pieces) == TEXT.encode()
    assert len(pieces) > 10
    assert all(piece.endswith(b"\n") for piece in pieces)
    (source / "line").write_text("ü" * 100)
    document = sources.examine(source / "line")
    assert document is not None
    pieces = list(sources.read_pieces(document))
    assert "".join(piece.decode() for piece in pieces) == "ü" * 100
    assert len(pieces) > 4


def test_tokens_are_made_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(source, cache=cache)
    monkeypatch.setattr(data, "_make", None)
    again = load_corpus(source, cache=cache)
    assert again.digest == corpus.digest
    assert torch.equal(_all_tokens(again), _all_tokens(corpus))


def test_a_change_is_never_served_stale(source: Path, cache: Path) -> None:
    """Not even one that leaves size and time of the file as they were."""
    path = source / "b"
    old = load_corpus(source, cache=cache)
    times = path.stat()
    path.write_bytes(b"SECOND\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    new = load_corpus(source, cache=cache)
    assert new.digest != old.digest
    assert b"SECOND" in _as_bytes(new)
    assert b"second" in _as_bytes(old), "what is mapped stays as it was"
    (source / "b").rename(source / "zz")
    assert load_corpus(source, cache=cache).digest != new.digest, "another order"


def test_a_change_of_the_tokenizer_is_noticed(tmp_path: Path, cache: Path, tokenizer: Path) -> None:
    (tmp_path / "text").write_text("w1 w2")
    old = load_corpus(tmp_path / "text", tokenizer=tokenizer, cache=cache)
    made = json.loads(tokenizer.read_text())
    made["model"]["vocab"] |= {"w1": 4, "w2": 3}
    tokenizer.write_text(json.dumps(made))
    new = load_corpus(tmp_path / "text", tokenizer=tokenizer, cache=cache)
    assert _all_tokens(old).tolist() == [3, 4, 1]
    assert _all_tokens(new).tolist() == [4, 3, 1]


def test_a_change_while_it_is_read_is_an_error(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = data.find_documents

    def find_and_change(*args: Any, **kwargs: Any) -> list[sources.Document]:
        documents = found(*args, **kwargs)
        (source / "b").write_bytes(b"SECOND\n")
        return documents

    monkeypatch.setattr(data, "find_documents", find_and_change)
    with pytest.raises(ValueError, match="b changed while it was read"):
        load_corpus(source, cache=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "by one", "empty", "longer"])
def test_a_damaged_cache_is_made_again(source: Path, cache: Path, damage: str) -> None:
    want = _as_bytes(load_corpus(source, cache=cache))
    (path,) = cache.iterdir()
    content = path.read_bytes()
    damaged = {"truncated": content[:300], "by one": content[:-1], "empty": b"", "longer": content + b"\0"}
    path.write_bytes(damaged[damage])
    assert _as_bytes(load_corpus(source, cache=cache)) == want
    assert path.read_bytes() == content


def _load_and_compare(source: Path, cache: Path, start: Any, results: Any) -> None:
    start.wait()
    results.put(_as_bytes(load_corpus(source, cache=cache)))


def test_processes_may_race(source: Path, cache: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mhckit.train.data"])
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_load_and_compare, args=(source, cache, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    read = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert read == [_as_bytes(load_corpus(source, cache=cache))] * 4
    assert len(list(cache.iterdir())) == 1


def test_what_a_killed_process_left_is_not_used_and_removed_in_time(source: Path, cache: Path) -> None:
    digest = load_corpus(source, cache=cache).digest
    (path,) = cache.iterdir()
    old = path.rename(cache / f".{digest}.tokens.{'0' * 32}.tmp")
    young = cache / f".{digest}.tokens.{'1' * 32}.tmp"
    young.write_bytes(b"half")
    past = time.time() - 2 * atomic.ABANDONED_SECONDS
    os.utime(old, (past, past))
    load_corpus(source, cache=cache)
    assert sorted(cache.iterdir()) == sorted([young, path])


def test_a_short_text_gives_more_of_itself_to_validation(tmp_path: Path, cache: Path) -> None:
    def split(length: int) -> tuple[int, int]:
        path = tmp_path / "text"
        path.write_text("x" * (length - 1))
        corpus = load_corpus(path, cache=cache)
        return corpus.train.numel(), corpus.validation.numel()

    assert split(1000) == (900, 100)
    assert split(100_000) == (100_000 - 8192, 8192)
    assert split(2_000_000) == (1_980_000, 20_000)


def test_progress(source: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    shown = load_corpus(source, cache=cache, show_progress=True)
    assert _as_bytes(shown) == _as_bytes(load_corpus(source, cache=cache / "other"))


TOKENS = torch.arange(1003, dtype=torch.int16)


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = batch(TOKENS, seq_len=7, batch_size=5, seed=0, step=3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_its_arguments_alone() -> None:
    arguments: dict[str, Any] = {"seq_len": 7, "batch_size": 5, "seed": 1, "step": 2}
    first, _ = batch(TOKENS, **arguments)
    torch.manual_seed(5)
    batch(TOKENS, **arguments | {"step": 900})
    data._order.cache_clear()
    assert torch.equal(batch(TOKENS, **arguments)[0], first)
    for other in ({"seed": 2}, {"step": 3}):
        assert not torch.equal(batch(TOKENS, **arguments | other)[0], first)


def test_ranks_share_the_batch_of_one_process() -> None:
    for step in (0, 5, 40):
        whole = batch(TOKENS, seq_len=7, batch_size=12, seed=1, step=step)
        parts = [batch(TOKENS, seq_len=7, batch_size=4, seed=1, step=step, rank=rank, world=3) for rank in range(3)]
        assert all(
            torch.equal(torch.cat(part), full) for part, full in zip(zip(*parts, strict=True), whole, strict=True)
        )
        halves = [batch(TOKENS, seq_len=7, batch_size=6, seed=1, step=2 * step + micro)[0] for micro in range(2)]
        assert torch.equal(torch.cat(halves), whole[0]), "accumulating gradients sees the same sequences"


def test_an_epoch_shows_every_sequence_once_and_the_next_cuts_elsewhere() -> None:
    sequences = 1002 // 7 - 1
    epochs = [
        torch.cat(
            [batch(TOKENS, seq_len=7, batch_size=1, seed=0, step=epoch * sequences + i)[0] for i in range(sequences)]
        )
        for epoch in range(3)
    ]
    for epoch in epochs:
        assert epoch.flatten().unique().numel() == sequences * 7
    assert len({int(epoch[:, 0].min()) for epoch in epochs}) > 1
    assert not torch.equal(epochs[0][:, 0].argsort(), epochs[1][:, 0].argsort())


def test_the_shortest_text_is_one_sequence() -> None:
    inputs, targets = batch(TOKENS[:8], seq_len=7, batch_size=2, seed=0, step=3)
    assert inputs.tolist() == [list(range(7))] * 2
    assert targets.tolist() == [list(range(1, 8))] * 2


def test_the_last_token_is_reached() -> None:
    """The cuts wander over all of the text."""
    seen = [batch(TOKENS[:20], seq_len=4, batch_size=8, seed=0, step=step)[1] for step in range(20)]
    assert {int(targets.max()) for targets in seen} >= {19}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": 1003}, r"the text must have seq_len \+ 1 = 1004 tokens or more, got 1003"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"rank": 2, "world": 2}, "rank must be from 0 to world - 1 = 1, got 2"),
    ],
)
def test_batch_errors(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch(TOKENS, **{"seq_len": 7, "batch_size": 1, "seed": 0, "step": 0} | changed)


def test_a_corpus_can_be_asked_before_training(source: Path, cache: Path) -> None:
    corpus = load_corpus(source, cache=cache)
    corpus.require(corpus.validation.numel() - 1)
    with pytest.raises(ValueError, match="validation must have seq_len"):
        corpus.require(corpus.validation.numel())
    with pytest.raises(ValueError, match="train must have seq_len"):
        corpus.require(corpus.train.numel())


def test_errors_name_what_is_wrong(tmp_path: Path, cache: Path, source: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        load_corpus(tmp_path / "nowhere", cache=cache)
    _write(tmp_path / "binary", a=b"\0\1", b=b"")
    with pytest.raises(ValueError, match=r"no text in .*binary"):
        load_corpus(tmp_path / "binary", cache=cache)
    with pytest.raises(ValueError, match=r"UTF-8 text without NUL bytes, and .*a is not"):
        load_corpus(tmp_path / "binary" / "a", cache=cache)
    with pytest.raises(ValueError, match="the file is empty"):
        load_corpus(tmp_path / "binary" / "b", cache=cache)
    with pytest.raises(ValueError, match=r"tokenizer must be a JSON file .* there is no .*missing\.json"):
        load_corpus(source, tokenizer=tmp_path / "missing.json", cache=cache)
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="b is not a JSON file of the library tokenizers"):
        load_corpus(source, tokenizer=source / "b", cache=cache)


def test_the_tokenizers_library_is_asked_for_by_name(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'mhckit\[train\]'"):
        load_corpus(source, tokenizer=source / "b", cache=cache)
