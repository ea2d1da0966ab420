"""The same computations in naive PyTorch, as a paper's formulas are first typed in: what the claims compare against.

Sinkhorn is a Python loop, streams are mixed by einsum, gradients come from autograd. Sums are float32 (float64 for
float64 input, so that these functions can also judge). Axes end in [..., N, C] for streams, [..., N, N] for matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 20
LIGER_EPS = 1e-6
MHC_CU_EPS = 1e-5
MHC_TRITON_EPS = 1e-8
MHC_TRITON_NORM_EPS = 1e-6


def upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def read(x: Tensor, pre: Tensor) -> Tensor:
    return (upcast(x) * pre.unsqueeze(-1)).sum(-2).to(x.dtype)


def mix(x: Tensor, res: Tensor) -> Tensor:
    return torch.einsum("...oi,...ic->...oc", res, upcast(x))


def write(x: Tensor, f: Tensor, post: Tensor, res: Tensor) -> Tensor:
    return (mix(x, res) + post.unsqueeze(-1) * upcast(f).unsqueeze(-2)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = upcast(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def project(x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    flat = upcast(x).flatten(-2)
    return flat @ phi.mT, flat.pow(2).mean(-1)


def logits(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the read weights, the write weights and the residual matrix."""
    n = x.shape[-2]
    z, mean_square = project(x, phi)
    z = z * torch.rsqrt(mean_square + eps).unsqueeze(-1)
    pre = z[..., :n] * scale[0] + bias[:n]
    post = z[..., n : 2 * n] * scale[1] + bias[n : 2 * n]
    res = z[..., 2 * n :] * scale[2] + bias[2 * n :]
    return pre, post, res.unflatten(-1, (n, n))


def liger_sinkhorn(res: Tensor) -> Tensor:
    res = res.softmax(-1) + LIGER_EPS
    res = res / (res.sum(-2, keepdim=True) + LIGER_EPS)
    for _ in range(ITERATIONS - 1):
        res = res / (res.sum(-1, keepdim=True) + LIGER_EPS)
        res = res / (res.sum(-2, keepdim=True) + LIGER_EPS)
    return res


def te_sinkhorn(res: Tensor) -> Tensor:
    """In log space; stored [in, out]."""
    for _ in range(ITERATIONS):
        res = res - res.logsumexp(-1, keepdim=True)
        res = res - res.logsumexp(-2, keepdim=True)
    return res.exp().mT


def mhc_cu_sinkhorn(res: Tensor) -> Tensor:
    """Rows with small sums are left alone, such columns are zeroed."""
    res = res.exp()
    for _ in range(ITERATIONS):
        rows = res.sum(-1, keepdim=True)
        res = torch.where(rows > MHC_CU_EPS, res / rows, res)
        columns = res.sum(-2, keepdim=True)
        res = torch.where(columns > MHC_CU_EPS, res / columns, 0)
    return res


def mhc_triton_sinkhorn(res: Tensor) -> Tensor:
    res = res.abs() + MHC_TRITON_EPS
    for _ in range(ITERATIONS):
        res = res / (res.sum(-1, keepdim=True) + MHC_TRITON_EPS)
        res = res / (res.sum(-2, keepdim=True) + MHC_TRITON_EPS)
    return res


def liger_coefficients(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, res = logits(x, phi, scale, bias, LIGER_EPS)
    return pre.sigmoid(), 2 * post.sigmoid(), liger_sinkhorn(res)


def mhc_cu_layer(x: Tensor, phi: Tensor | None, scale: Tensor | None, bias: Tensor, weight: Tensor) -> Tensor:
    """The whole layer, whose sublayer is a weighted RMSNorm; static without phi, one matrix for all tokens then."""
    n = x.shape[-2]
    if phi is None or scale is None:
        pre, post, res = bias[:n], bias[n : 2 * n], bias[2 * n :].unflatten(-1, (n, n))
    else:
        pre, post, res = logits(x, phi, scale, bias, MHC_CU_EPS)
    f = rms_norm(read(x, pre.sigmoid()), weight, MHC_CU_EPS)
    return write(x, f, 2 * post.sigmoid(), mhc_cu_sinkhorn(res))


def mhc_triton_connection(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Read, a sublayer that halves, write."""
    pre, post, res = logits(x, phi, scale, bias, MHC_TRITON_NORM_EPS)
    pre = pre.sigmoid()
    pre = pre / (pre.sum(-1, keepdim=True) + MHC_TRITON_EPS)
    return write(x, read(x, pre) * 0.5, 2 * post.sigmoid(), mhc_triton_sinkhorn(res))
