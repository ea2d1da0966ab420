"""What went wrong, in a line that says what to do about it."""

from __future__ import annotations

import dis
import errno
import sys
from pathlib import Path
from traceback import walk_tb

PACKAGE = Path(__file__).parents[1]
# Which extra of mhckit brings a module that can be missing.
EXTRAS = {
    "accelerate": "transformers",
    "matplotlib": "viz",
    "safetensors": "train",
    "tensorboard": "train",
    "tokenizers": "train",
    "transformers": "transformers",
    "yaml": "train",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNEXPECTED = "a bug in mhckit or something about this machine; `mhckit --debug ...` shows where"


def in_a_line(error: BaseException) -> str:
    """The line for a person; what a file or a checkpoint put into it is shown, not obeyed."""
    words = " ".join(_words(error).split())
    return "mhckit: " + "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)


def need_a_gpu(command: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"{command} needs a CUDA GPU, and torch finds none here: `mhckit doctor` says more")


def _words(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and not _is_raised_by_mhckit(error):
        return _missing_module(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _from_the_system(error)
    if isinstance(error, UnicodeDecodeError):  # which does not know the file
        return f"one of the given files is not UTF-8 text: {error} ({_place(error)})"
    if _is_out_of_memory(error):
        return _out_of_memory(error)
    if isinstance(error, (ValueError, TypeError, ImportError, FloatingPointError)) and _is_raised_by_mhckit(error):
        return str(error)
    return f"{type(error).__name__}: {error} ({_place(error)}): {_UNEXPECTED}"


def _missing_module(error: ModuleNotFoundError) -> str:
    name = (error.name or "").partition(".")[0]
    if name in EXTRAS:
        return f'this needs {name}: pip install "mhckit[{EXTRAS[name]}]"'
    if name and name != PACKAGE.name:
        return f"this needs {name}: pip install {name}"
    return f"{error} ({_place(error)}): {_UNEXPECTED}"


def _from_the_system(error: OSError) -> str:
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    where = f": {names}" if names else ""
    if isinstance(error, FileNotFoundError):
        return f"no such file or folder{where}; is the path right{_seen_from_here()}?"
    if isinstance(error, IsADirectoryError):
        return f"a folder where a file should be{where}; name a file"
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return f"a file where a folder should be{where}; name another path"
    if isinstance(error, PermissionError):
        return f"permission denied{where}; look at its owner and mode, or name another path"
    if error.errno in _FULL:
        return f"the disk is full{where}; make room, or name a path on another disk"
    return f"{error.strerror}{where} ({_place(error)})"


def _seen_from_here() -> str:
    try:
        return f", seen from {Path.cwd()}"
    except OSError:  # the folder is gone
        return ""


def _is_out_of_memory(error: BaseException) -> bool:
    """torch raises a class of its own for GPUs, and a RuntimeError for the host."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_gpu or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(error: BaseException) -> str:
    first_sentences = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    told = f" ({first_sentences})" if first_sentences else ""
    return (
        f"out of memory{told}; take a smaller model or fewer tokens at once, and in training "
        "a larger --grad-accum, --recompute auto or --loss chunked"
    )


def _is_raised_by_mhckit(error: BaseException) -> bool:
    """Whether a `raise` of mhckit's made it: then its text is meant for the user, and says what was wanted and came.

    The same kinds come out of the standard library and of mistakes in mhckit, and then explain nothing.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    is_raise = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and PACKAGE in Path(code.co_filename).parents


def _place(error: BaseException) -> str:
    """The last line of mhckit's on the way to the error."""
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents:
            return f"{file.relative_to(PACKAGE.parent)}, line {line}"
    return "outside mhckit"
