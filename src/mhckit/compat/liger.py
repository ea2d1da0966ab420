r"""The mHC of Liger-Kernel 0.8 on mhckit's operators: replace the import, keep the calls and the checkpoints.

    r      = rsqrt(mean(x^2) + rms_eps)          l = alpha (x phi) r + b          (one alpha each for pre, post and res)
    h_pre  = sigmoid(l_pre) + pre_eps            h_post = post_mult sigmoid(l_post)
    h_res  = softmax(l_res, rows) + e, then columns, and tmax - 1 times rows, columns, each divided by (their sum + e)

    x_in[c] = sum_i h_pre[i] x[i,c]              x_out[o,c] = sum_i h_res[o,i] x[i,c] + h_post[o] f_out[c]

N streams (Liger's hc; o out, i in); C channels (c); e = sinkhorn_eps; x is [..., N, C]; phi is [N*C, P] with
P = N*N + 2*N columns: N of pre, N of post, then h_res row by row as [out, in]. Coefficients are float32, x_in and x_out
have the dtype of x.

What differs on purpose:

- The projection's gradients are not rounded to the dtype of phi before they are multiplied, as Liger's are where x and
  phi share a 16-bit dtype. ``LigerMHC`` and ``liger_mhc_forward`` hand x_in to the layer in the layer's dtype; Liger
  rounds it to the dtype of x before that.
- No atomics: the gradients of phi have the same bits in every run. Sinkhorn's history is not kept for backward.
- Any N of 1 to 8, not powers of 2 alone. Above 8, which Liger compiles up to 16, GPU tensors need
  ``mhckit.backend("reference")``. CPU tensors work. Liger's warning above 16 is not given.
- Bad arguments raise ValueError or TypeError, not AssertionError; rms_eps must be positive.
- ``liger_mhc_apply`` computes x_in only where it is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mhckit.ops import coefficients, enter, post, pre
from mhckit.ops._check import check_shape, check_streams, check_tensor
from mhckit.recipe import Recipe, softmax_start

from ._recipes import recipe_of

__all__ = [
    "LigerMHC",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
]


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """h_pre [..., N], h_post [..., N] and h_res [..., N_out, N_in] of streams x [..., N, C], in float32."""
    settings = (tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    arguments, recipe = _translate(x, phi, b, (alpha_pre, alpha_post, alpha_res), allow_fp32, settings)
    h_pre, h_post, h_res = coefficients(*arguments, recipe=recipe)
    assert h_res is not None
    return h_pre, h_post, h_res


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """x_in [..., C], what the layer reads from the streams x [..., N, C] with weights h_pre [..., N]."""
    lead, streams, _ = check_streams(x)
    check_shape("h_pre", h_pre, "[..., N]", (*lead, streams), like=x)
    return pre(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """x_out [..., N, C], the streams mixed by h_res [..., N_out, N_in], and f_out [..., C] times h_post [..., N]."""
    lead, streams, channels = check_streams(x)
    check_shape("f_out", f_out, "[..., C]", (*lead, channels), like=x)
    check_shape("h_post", h_post, "[..., N]", (*lead, streams), like=x)
    check_shape("h_res", h_res, "[..., N_out, N_in]", (*lead, streams, streams), like=x)
    return post(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x_out, or (x_out, x_in) with ``return_x_in``, from coefficients and the layer's output."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """The whole sublayer: x_out, or (x_out, (h_pre, h_post, h_res)) with ``return_coeffs``.

    The layer gets x_in [..., C] in the dtype of its first parameter, or of x if it has none, and returns [..., C].
    Coefficients and x_in come from one operator, whose gradient of x includes that of the write-back.
    """
    settings = (tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    arguments, recipe = _translate(x, phi, b, (alpha_pre, alpha_post, alpha_res), allow_fp32, settings)
    x, x_in, mix = enter(*arguments, recipe=recipe, out_dtype=_first_dtype(layer, x.dtype))
    assert mix.res is not None
    x_out = liger_mhc_post_res(x, layer(x_in), mix.post, mix.res)
    return (x_out, tuple(mix)) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """A layer [..., C] -> [..., C] as a module from streams to streams, [..., N, C] -> [..., N, C].

    Parameters, their names, shapes, dtypes and initial values (at the same seed) are Liger's, so checkpoints load both
    ways: phi [N*C, N*N + 2*N] normal with standard deviation 0.02, b [N*N + 2*N] of zeros, and scalars alpha_pre,
    alpha_post, alpha_res of 1. They are made on the device of the layer's first parameter. For an initialisation that
    starts as the plain residual network, see ``mhckit.MHC``.

    Args:
        layer: the sublayer.
        hc: N, the number of streams.
        c: C, the width of the model.
        tmax: Sinkhorn's iterations.
        rms_eps: added to the mean square of the projection's norm.
        pre_eps: added to the read weights.
        sinkhorn_eps: added to Sinkhorn's start and to each of its sums; 0 is exact for logits of any size.
        post_mult: the largest write weight.
        phi_dtype: dtype in which phi is stored; products with it are summed in float32 whatever it is.
        allow_fp32: take float32 streams. Without it they raise, as in Liger; nothing else depends on it.
    """

    mhckit_projections = ("phi",)
    mhckit_no_decay = ("b", "alpha_pre", "alpha_post", "alpha_res")

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("hc", hc), ("c", c)):
            if int(value) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.layer = layer
        self.hc, self.c, self.tmax = int(hc), int(c), int(tmax)
        self.rms_eps, self.pre_eps = float(rms_eps), float(pre_eps)
        self.sinkhorn_eps, self.post_mult = float(sinkhorn_eps), float(post_mult)
        self.allow_fp32 = bool(allow_fp32)
        settings = (self.tmax, self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult)
        width, columns = self.hc * self.c, _recipe(self.hc, settings).rows

        first = next(layer.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self.phi = nn.Parameter(torch.randn(width, columns, dtype=phi_dtype, device=device).mul_(0.02))
        self.b = nn.Parameter(torch.zeros(columns, dtype=torch.float32, device=device))
        self.alpha_pre = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_post = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_res = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x_out [..., N, C] of streams x [..., N, C], in the dtype of x."""
        if check_streams(x)[1:] != (self.hc, self.c):
            raise ValueError(f"x must be [..., N, C] = (..., {self.hc}, {self.c}), got {tuple(x.shape)}")
        return liger_mhc_forward(
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


_Settings = tuple[int, float, float, float, float]  # tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult

_NAMES = "tmax is iterations, rms_eps is norm_eps, sinkhorn_eps is eps and post_mult is post_scale"


def _recipe(streams: int, settings: _Settings) -> Recipe:
    tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult = settings
    return recipe_of(
        "liger",
        _NAMES,
        streams=streams,
        iterations=int(tmax),
        norm_eps=float(rms_eps),
        pre_eps=float(pre_eps),
        post_scale=float(post_mult),
        **softmax_start(float(sinkhorn_eps)),
    )


def _translate(
    x: Tensor, phi: Tensor, b: Tensor, alphas: tuple[Tensor, Tensor, Tensor], allow_fp32: bool, settings: _Settings
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Recipe]:
    """x, phi [P, N*C], scale [3] and bias [P] as mhckit's operators take them, and the recipe."""
    _, streams, channels = check_streams(x)
    if x.dtype not in (torch.bfloat16, torch.float16) and not (allow_fp32 and x.dtype == torch.float32):
        raise TypeError(
            "x [..., N, C] must be bfloat16 or float16, or float32 with allow_fp32=True, "
            f"got {x.dtype} with allow_fp32={allow_fp32}"
        )
    recipe = _recipe(streams, settings)
    check_shape("phi", phi, "[N*C, N*N + 2*N]", (streams * channels, recipe.rows), like=x)
    check_shape("b", b, "[N*N + 2*N]", (recipe.rows,), like=x)
    for name, alpha in zip(("alpha_pre", "alpha_post", "alpha_res"), alphas, strict=True):
        if check_tensor(name, alpha, "[]", like=x).numel() != 1:
            raise ValueError(f"{name} must be a scalar [] = (), got {tuple(alpha.shape)}")
    return (x, phi.t(), torch.stack([alpha.reshape(()) for alpha in alphas]), b), recipe


def _first_dtype(layer: Callable[[Tensor], Tensor], otherwise: torch.dtype) -> torch.dtype:
    """The dtype of the layer's first parameter, if it has parameters."""
    parameters: Any = getattr(layer, "parameters", None)
    first = None if parameters is None else next(iter(parameters()), None)
    return otherwise if first is None else first.dtype
