"""Kernels of `project`: F1 without a write-back, and the sums of its slots; J and P without the rest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mhckit.ops._register import empty, pack

from ._device import load_float, store_as, tokens_of_program
from ._gradients import CollapseGradient, ProjectionGradient
from ._launch import FLOAT, cdiv, phi_layout, tokens_of
from ._launcher import run
from ._pack import pack_dz, pack_phi
from ._parameters_bwd import chunk_sums, finish
from ._streams_bwd import read_streams_bwd
from ._write_project import project_partials


@triton.jit(do_not_specialize=["T", "slots"])
def _add_up_kernel(partials, squares, z, mean_square, T, slots, width, P, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):
    t, live = tokens_of_program(T, BLOCK_T)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    tile = live[:, None] & (p < P)[None, :]
    total = load_float(partials, t[:, None] * P + p[None, :], tile)
    square = load_float(squares, t, live)
    for slot in range(1, slots):
        at = tl.cast(slot, tl.int64) * T + t
        total += load_float(partials, at[:, None] * P + p[None, :], tile)
        square += load_float(squares, at, live)
    store_as(z, t[:, None] * P + p[None, :], total, tile)
    store_as(mean_square, t, tl.div_rn(square, width), live & (tl.program_id(1) == 0))


def project_fwd(x: Tensor, phi: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    (T, N, C), lead, P = tokens_of(x), x.shape[:-2], phi.shape[0]
    z, mean_square = empty(x, *lead, P, dtype=FLOAT), empty(x, *lead, dtype=FLOAT)
    partials, squares, *_ = project_partials(x, phi, norm_weight, many=False)
    run(
        _add_up_kernel, (cdiv(T, 32), cdiv(P, 32)),
        partials, squares, z, mean_square, T, partials.shape[0], float(N * C), P, BLOCK_T=32, BLOCK_P=32,
    )  # fmt: skip
    return z, mean_square


def project_bwd(
    dz: Tensor | None, dms: Tensor | None, x: Tensor, phi: Tensor, norm_weight: Tensor | None, need_phi: bool
) -> tuple[Tensor, ...]:
    lead, (_T, N, C) = x.shape[:-2], tokens_of(x)
    dz = x.new_zeros(*lead, phi.shape[0], dtype=FLOAT) if dz is None else dz
    k = x.new_zeros(lead, dtype=FLOAT) if dms is None else dms * (2 / (N * C))
    rows = phi.shape[0]
    phi_parts = pack_phi(phi, norm_weight, N, phi_layout(N, C, rows))
    projection = ProjectionGradient(pack_dz(dz, x), k, None, phi_parts, rows)
    dx = read_streams_bwd(x, None, CollapseGradient(), projection)
    if not need_phi:
        return pack((dx, None, None), otherwise=x)
    sums = chunk_sums(x, dz_parts=projection.dz_parts, phi=phi, norm_weight=norm_weight)
    done = finish(sums, None, None, streams=N, channels=C, phi=phi, norm_weight=norm_weight)
    return pack((dx, done.phi, done.norm_weight), otherwise=x)
