"""Kernels of `post`: F1 without a projection; J without a read."""

from __future__ import annotations

from torch import Tensor

from mhckit.ops._register import pack

from ._parameters_bwd import sum_rows
from ._streams_bwd import CollapseGradient, ProjectionGradient, Write, write_streams_bwd
from ._write_project import write


def post_fwd(x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None) -> Tensor:
    return write(x, f, f_bias, post, res)


def post_bwd(
    g: Tensor, x: Tensor, f: Tensor, f_bias: Tensor | None, post: Tensor, res: Tensor | None
) -> tuple[Tensor, ...]:
    dx, df, df_sums, dpost, dres = write_streams_bwd(
        x, g, CollapseGradient(), ProjectionGradient(), Write(f, f_bias, post, res)
    )
    df_bias = None if f_bias is None or df_sums is None else sum_rows(df_sums, like=f_bias)
    return pack((dx, df, df_bias, dpost, dres), otherwise=x)
