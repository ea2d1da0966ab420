"""Words for errors of other libraries."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """What an exception of another library says, without its line breaks and its length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
