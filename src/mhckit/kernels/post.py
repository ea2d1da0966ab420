"""Kernels of `post`: F1 without a projection; J without a read."""

from __future__ import annotations

from torch import Tensor

from mhckit.ops._register import pack

from ._gradients import CollapseGradient, ProjectionGradient, Write
from ._launch import tokens_of
from ._parameters_bwd import PhiSums, finish
from ._streams_bwd import write_streams_bwd
from ._write_project import write


def post_fwd(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None) -> Tensor:
    return write(x, f, f_bias, post, res)


def post_bwd(
    g: Tensor, x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None
) -> tuple[Tensor, ...]:
    written = write_streams_bwd(x, g, CollapseGradient(), ProjectionGradient(), Write(f, f_bias, post, res), False)
    df_bias = None
    if f_bias is not None:
        _T, N, C = tokens_of(x)
        df_bias = finish(PhiSums(), None, written, streams=N, channels=C, f_bias=f_bias).f_bias
    return pack((written.dx, written.df, df_bias, written.dpost, written.dres), otherwise=x)
