"""What other implementations claim, as data: a claim is measured here by the case and the quantity that it names.

Claims are those of the documents they cite. Where a document gives one figure for many shapes, the figure stands for
all of them; a range is from the worst to the best of its shapes, whichever those were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Quantity = Literal["speedup", "memory saved", "memory ratio", "of the bound", "microseconds"]
Passes = Literal["forward", "backward", "both"]


class Shape(NamedTuple):
    """Sequences, tokens in each, channels; there are always 4 streams."""

    batch: int
    length: int
    channels: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.length} C{self.channels}"


@dataclass(frozen=True)
class Claim:
    """A figure that somebody published.

    Attributes:
        source, hardware: where it is published, and what it was measured on.
        what: the operation, in their words.
        case: the computation that stands for it here, a key of ``CASES``.
        passes, shapes: what of it runs, and on which shapes.
        quantity: what the figure is.
        claimed: the lowest and the highest figure.
        note: in what the measurement here differs from theirs.
    """

    source: str
    hardware: str
    what: str
    case: str
    passes: Passes
    shapes: tuple[Shape, ...]
    quantity: Quantity
    claimed: tuple[float, float]
    note: str = ""


@dataclass(frozen=True)
class NotMeasurable:
    """A claim that one GPU cannot answer, and why."""

    source: str
    hardware: str
    what: str
    claimed: str
    why: str


_LIGER = ("Liger-Kernel issue 1066", "RTX 3090")
_LIGER_SHAPES = tuple(Shape(4, length, 4096) for length in (128, 256, 512, 1024, 2048))
_LIGER_FIGURES = {  # case: speedup, percent of memory saved
    "liger coeffs": (3.5, 77),
    "liger pre": (2.2, 33),
    "liger post_res": (1.9, 31),
    "liger language model": (1.5, 18),
}

# The 13 shapes of the tables in the pull request, largest models last.
_TE = ("Transformer Engine PR 2790", "B200")
_TE_SHAPES = (
    Shape(3, 8192, 2048),
    Shape(8, 2048, 2560),
    Shape(1, 8192, 4096),
    Shape(4, 2048, 4096),
    Shape(4, 4096, 4096),
    Shape(4, 8192, 4096),
    Shape(2, 4096, 5120),
    Shape(1, 4096, 6656),
    Shape(4, 8192, 7168),
    Shape(1, 4096, 8192),
    Shape(1, 8192, 8192),
    Shape(1, 2048, 12288),
    Shape(1, 8192, 16384),
)
_TE_PERCENT = {  # case: forward, backward
    "te expand_combine": ((85, 88), (65, 67)),
    "te aggregate": ((82, 88), (74, 77)),
    "te projection": ((56, 71), (55, 58)),
}
_TE_SINKHORN = ((7, 23), (11, 29))
_TE_NOTE = "GPU time of the kernels; their bound is the nominal bandwidth, ours the copy ceiling of the same run"

_MHC_CU = ("mHC.cu", "H100")
_MHC_CU_SHAPES = (Shape(1, 320, 1280), Shape(1, 512, 1920), Shape(1, 1280, 2560), Shape(1, 2560, 1280))
_MHC_CU_SPEEDUPS: dict[tuple[str, Passes], tuple[float, ...]] = {
    ("static", "forward"): (15.2, 10.5, 5.7, 5.7),
    ("static", "backward"): (10.1, 9.2, 4.3, 4.2),
    ("dynamic", "forward"): (7.4, 7.4, 5.3, 5.2),
    ("dynamic", "backward"): (3.4, 3.5, 3.1, 3.0),
}

_MHC_TRITON = ("mHC-triton", "H100")
_MHC_TRITON_SHAPES = (Shape(8, 2048, 4096),)
_MHC_TRITON_FIGURES: tuple[tuple[str, Passes, Quantity, float, str], ...] = (
    ("mhc_triton sinkhorn", "forward", "speedup", 5.2, "float32 logits; theirs are float16"),
    ("mhc_triton stream mix", "forward", "speedup", 5.8, "coefficients per token, theirs per sequence; bfloat16"),
    ("mhc_triton connection", "both", "speedup", 4.3, "coefficients per token, theirs per sequence; bfloat16"),
    ("mhc_triton sinkhorn", "both", "memory ratio", 20, "beyond logits and incoming gradient"),
)

_DIRECTIONS: tuple[Passes, Passes] = ("forward", "backward")


def _name(case: str) -> str:
    """What a case computes, without the system it is named after."""
    return case.split(maxsplit=1)[1]


def _percent_claims() -> list[Claim]:
    """Transformer Engine's, in percent of the memory bound."""
    return [
        Claim(*_TE, _name(case), case, passes, _TE_SHAPES, "of the bound", percent, _TE_NOTE)
        for case, figures in _TE_PERCENT.items()
        for passes, percent in zip(_DIRECTIONS, figures, strict=True)
    ]


def _layer_claims() -> list[Claim]:
    """mHC.cu's, a figure for each shape."""
    return [
        Claim(*_MHC_CU, f"{kind} layer", f"mhc_cu {kind} layer", passes, (shape,), "speedup", (figure, figure))
        for (kind, passes), figures in _MHC_CU_SPEEDUPS.items()
        for shape, figure in zip(_MHC_CU_SHAPES, figures, strict=True)
    ]


CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(*_LIGER, _name(case), case, "both", _LIGER_SHAPES, quantity, (figure, figure))
        for case, figures in _LIGER_FIGURES.items()
        for quantity, figure in zip(("speedup", "memory saved"), figures, strict=True)
    ),
    *_percent_claims(),
    *(
        Claim(*_TE, "sinkhorn", "te sinkhorn", passes, _TE_SHAPES, "microseconds", figures, _TE_NOTE)
        for passes, figures in zip(_DIRECTIONS, _TE_SINKHORN, strict=True)
    ),
    *_layer_claims(),
    *(
        Claim(*_MHC_TRITON, _name(case), case, passes, _MHC_TRITON_SHAPES, quantity, (figure, figure), note)
        for case, passes, quantity, figure, note in _MHC_TRITON_FIGURES
    ),
)

NOT_MEASURABLE: tuple[NotMeasurable, ...] = (
    NotMeasurable(*_TE, "2B model on 128 GPUs", "960 ms a step without mHC, 1100 ms with", "needs 128 GPUs"),
    NotMeasurable(*_TE, "2B model on 128 GPUs, cuTile", "1160 ms a step", "needs 128 GPUs and another implementation"),
    NotMeasurable(
        "arXiv 2512.24880", "not said", "training at n = 4", "+6.7% time", "an overlapped pipeline stage: many GPUs"
    ),
    NotMeasurable("Megatron-LM PR 4527", "none", "four fused operators", "parity with unfused code", "no figures"),
)
