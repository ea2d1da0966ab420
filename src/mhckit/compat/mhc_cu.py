r"""The interface of mHC.cu: ``from mhckit.compat.mhc_cu import MHCLayer`` in place of ``from mhc import MHCLayer``.

    r = 1 / sqrt(mean(x^2) + eps)                    over the n*C values of a token
    pre  = sigmoid(alpha_pre r (phi_pre x) + b_pre)           post = 2 sigmoid(alpha_post r (phi_post x) + b_post)
    M    = sinkhorn_knopp(exp(alpha_res r (phi_res x) + b_res))
    f[c] = w[c] a[c] / sqrt(mean_c a[c]^2 + eps)     with a[c] = sum_i pre[i] x[i,c]
    y[o,c] = sum_i M[o,i] x[i,c] + post[o] f[c]

Static layers take H_pre, H_post and H_res for the logits of pre, post and M.
B tokens (any leading axes); n streams, o out and i in; C channels.

What differs on purpose:

- Gradients are exact. The original's dynamic backward uses the first token's coefficients for every token.
- Nothing is rounded on the way: the original rounds phi, w, the projected streams, a and f to bfloat16. The output is
  float32 in both.
- Logits of any size are exact: the original clamps those above 20.
- alpha stays on its device: no host synchronisation.
- Everything runs on the CPU too, with any leading axes. On a GPU, more than 8 streams need
  ``mhckit.backend("reference")``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhckit.ops import enter, leave, pre, sinkhorn
from mhckit.ops._check import check_eps, check_shape, check_tensor
from mhckit.recipe import Recipe

from ._check import check_count, check_positive_eps, check_scalar
from ._recipes import recipe_of

__all__ = [
    "MHCLayer",
    "mhc_layer_fused",
    "mhc_layer_fused_dynamic",
    "mhc_layer_fused_dynamic_inference",
    "mhc_layer_fused_inference",
    "rmsnorm",
    "sinkhorn_knopp",
]

# Added before the logarithm of a matrix: changes no entry above 1e-22, and gives a zero a finite logarithm, with which
# value and gradient of the iteration come out as those of the zero.
_TINY = 1e-30
_SMALLEST_SUM = 1e-25  # what such zeros add up to stays below it


class MHCLayer(nn.Module):
    """A whole layer of mHC whose sublayer is a weighted RMSNorm: streams in, streams out.

    Args:
        hidden_dim: C.
        expansion_rate: n, the number of streams.
        sinkhorn_iters: how often rows and columns are normalised.
        eps: of both norms, and the sum below which Sinkhorn does not divide.
        alpha_init: initial alpha; for a static layer the spread of the initial H_res.
        use_dynamic_h: compute the coefficients from each token's streams; False learns one set for all.

    Parameters: ``rmsnorm_weight`` [C], in bfloat16. Dynamic: ``phi_pre`` [n, n*C], ``phi_post`` [n, n*C], ``phi_res``
    [n*n, n*C], ``b_pre`` [n], ``b_post`` [n], ``b_res`` [n, n] and scalars ``alpha_pre``, ``alpha_post``,
    ``alpha_res``. Static: ``H_pre`` [n], ``H_post`` [n], ``H_res`` [n, n].
    """

    mhckit_projections = ("phi_pre", "phi_post", "phi_res")
    mhckit_no_decay = (
        "b_pre", "b_post", "b_res", "alpha_pre", "alpha_post", "alpha_res", "H_pre", "H_post", "H_res", "rmsnorm_weight"
    )  # fmt: skip

    def __init__(
        self,
        hidden_dim: int,
        expansion_rate: int = 4,
        sinkhorn_iters: int = 20,
        eps: float = 1e-5,
        alpha_init: float = 0.01,
        use_dynamic_h: bool = True,
    ) -> None:
        super().__init__()
        self.hidden_dim = check_count("hidden_dim", hidden_dim)
        self.expansion_rate = check_count("expansion_rate", expansion_rate)
        self.sinkhorn_iters = check_count("sinkhorn_iters", sinkhorn_iters)
        self.eps = check_positive_eps(eps)
        self.use_dynamic_h = use_dynamic_h
        self.recipe = _recipe(expansion_rate, sinkhorn_iters, eps, use_dynamic_h)
        n, width = expansion_rate, expansion_rate * hidden_dim
        self.rmsnorm_weight = nn.Parameter(torch.ones(hidden_dim, dtype=torch.bfloat16))
        if use_dynamic_h:
            self.phi_pre = nn.Parameter(0.02 * torch.randn(n, width))
            self.phi_post = nn.Parameter(0.02 * torch.randn(n, width))
            self.phi_res = nn.Parameter(0.02 * torch.randn(n * n, width))
            self.b_pre = nn.Parameter(torch.zeros(n))
            self.b_post = nn.Parameter(torch.zeros(n))
            self.b_res = nn.Parameter(torch.zeros(n, n))
            self.alpha_pre = nn.Parameter(torch.tensor(float(alpha_init)))
            self.alpha_post = nn.Parameter(torch.tensor(float(alpha_init)))
            self.alpha_res = nn.Parameter(torch.tensor(float(alpha_init)))
        else:
            self.H_pre = nn.Parameter(torch.zeros(n))
            self.H_post = nn.Parameter(torch.zeros(n))
            self.H_res = nn.Parameter(alpha_init * torch.randn(n, n))

    def forward(self, x_expanded: Tensor) -> Tensor:
        """y [B, n, C] in float32 from streams x_expanded [B, n, C]."""
        check_tensor("x_expanded", x_expanded, "[B, n, C]")
        wanted = (self.expansion_rate, self.hidden_dim)
        if x_expanded.shape[-2:] != wanted:
            raise ValueError(f"x_expanded must be [B, n, C] with (n, C) = {wanted}, got {tuple(x_expanded.shape)}")
        if not self.use_dynamic_h:
            return _static(x_expanded, self.rmsnorm_weight, self.H_pre, self.H_post, self.H_res, self.recipe)
        return _dynamic(
            x_expanded,
            self.rmsnorm_weight,
            {"phi_pre": self.phi_pre, "phi_post": self.phi_post, "phi_res": self.phi_res},
            {"alpha_pre": self.alpha_pre, "alpha_post": self.alpha_post, "alpha_res": self.alpha_res},
            {"b_pre": self.b_pre, "b_post": self.b_post, "b_res": self.b_res},
            self.recipe,
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_dim={self.hidden_dim}, expansion_rate={self.expansion_rate}, "
            f"sinkhorn_iters={self.sinkhorn_iters}, eps={self.eps}, use_dynamic_h={self.use_dynamic_h}"
        )


def mhc_layer_fused(
    x_expanded: Tensor,
    rmsnorm_weight: Tensor,
    H_pre: Tensor,
    H_post: Tensor,
    H_res: Tensor,
    sinkhorn_iters: int = 20,
    eps: float = 1e-5,
) -> Tensor:
    """The static layer: y [B, n, C] in float32.

    Args:
        x_expanded: streams [B, n, C].
        rmsnorm_weight: [C].
        H_pre, H_post, H_res: logits [n], [n] and [n, n], the same for every token.
        sinkhorn_iters, eps: as in ``MHCLayer``.
    """
    recipe = _recipe(_count_streams(x_expanded), sinkhorn_iters, eps, False)
    return _static(x_expanded, rmsnorm_weight, H_pre, H_post, H_res, recipe)


def mhc_layer_fused_dynamic(
    x_expanded: Tensor,
    rmsnorm_weight: Tensor,
    phi_pre: Tensor,
    phi_post: Tensor,
    phi_res: Tensor,
    alpha_pre: Tensor | float,
    alpha_post: Tensor | float,
    alpha_res: Tensor | float,
    b_pre: Tensor,
    b_post: Tensor,
    b_res: Tensor,
    sinkhorn_iters: int = 20,
    eps: float = 1e-5,
) -> Tensor:
    """The dynamic layer: y [B, n, C] in float32.

    Args:
        x_expanded: streams [B, n, C].
        rmsnorm_weight: [C].
        phi_pre, phi_post, phi_res: projections [n, n*C], [n, n*C] and [n*n, n*C].
        alpha_pre, alpha_post, alpha_res: tensors of one element, or numbers.
        b_pre, b_post, b_res: biases [n], [n] and [n, n].
        sinkhorn_iters, eps: as in ``MHCLayer``.
    """
    return _dynamic(
        x_expanded,
        rmsnorm_weight,
        {"phi_pre": phi_pre, "phi_post": phi_post, "phi_res": phi_res},
        {"alpha_pre": alpha_pre, "alpha_post": alpha_post, "alpha_res": alpha_res},
        {"b_pre": b_pre, "b_post": b_post, "b_res": b_res},
        _recipe(_count_streams(x_expanded), sinkhorn_iters, eps, True),
    )


@torch.no_grad()
def mhc_layer_fused_inference(
    x_expanded: Tensor,
    rmsnorm_weight: Tensor,
    H_pre: Tensor,
    H_post: Tensor,
    H_res: Tensor,
    sinkhorn_iters: int = 20,
    eps: float = 1e-5,
) -> Tensor:
    """``mhc_layer_fused`` without gradients."""
    return mhc_layer_fused(x_expanded, rmsnorm_weight, H_pre, H_post, H_res, sinkhorn_iters, eps)


@torch.no_grad()
def mhc_layer_fused_dynamic_inference(
    x_expanded: Tensor,
    rmsnorm_weight: Tensor,
    phi_pre: Tensor,
    phi_post: Tensor,
    phi_res: Tensor,
    alpha_pre: Tensor | float,
    alpha_post: Tensor | float,
    alpha_res: Tensor | float,
    b_pre: Tensor,
    b_post: Tensor,
    b_res: Tensor,
    sinkhorn_iters: int = 20,
    eps: float = 1e-5,
) -> Tensor:
    """``mhc_layer_fused_dynamic`` without gradients."""
    phi, alpha, b = (phi_pre, phi_post, phi_res), (alpha_pre, alpha_post, alpha_res), (b_pre, b_post, b_res)
    return mhc_layer_fused_dynamic(x_expanded, rmsnorm_weight, *phi, *alpha, *b, sinkhorn_iters, eps)


def sinkhorn_knopp(inp: Tensor, num_iters: int = 20, eps: float = 1e-8) -> Tensor:
    """Rows, then columns divided by their sums, num_iters times; float32.

    A row whose sum is not above eps is left alone, such a column becomes zero. Zeros are exact, in value and gradient.
    Negative entries, which the original lets pass, give NaN: the iteration runs on logarithms.

    Args:
        inp: square matrices [..., n, n] of entries that are not negative.
        num_iters: how often.
        eps: sums up to it do not divide (sums up to 1e-25 never do).
    """
    check_tensor("inp", inp, "[..., n, n]")
    if inp.ndim < 2 or inp.shape[-1] != inp.shape[-2] or inp.shape[-1] < 1:
        raise ValueError(f"inp must be [..., n, n] with n >= 1, got {tuple(inp.shape)}")
    check_count("num_iters", num_iters)
    recipe = _recipe(inp.shape[-1], num_iters, max(check_eps("eps", eps), _SMALLEST_SUM), False)
    matrix = sinkhorn((inp.float() + _TINY).log(), recipe=recipe)
    assert matrix is not None
    return matrix


def rmsnorm(inp: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """weight * inp / sqrt(mean(inp^2) + eps) over the last axis; inputs are rounded to bfloat16, as is the result.

    Args:
        inp: [..., C].
        weight: [C].
        eps: added to the mean square.
    """
    check_tensor("inp", inp, "[..., C]")
    if inp.ndim < 1 or inp.shape[-1] < 1:
        raise ValueError(f"inp must be [..., C] with C >= 1, got {tuple(inp.shape)}")
    check_shape("weight", weight, "[C]", (inp.shape[-1],), like=inp)
    stream = inp.bfloat16().unsqueeze(-2)  # one stream, read with weight 1
    one = stream.new_ones(stream.shape[:-1], dtype=torch.float32)
    return pre(stream, one, out_norm_weight=weight.bfloat16(), out_norm_eps=eps)


def _static(x: Tensor, weight: Tensor, H_pre: Tensor, H_post: Tensor, H_res: Tensor, recipe: Recipe) -> Tensor:
    bias = _flat_logits({"H_pre": H_pre, "H_post": H_post, "H_res": H_res}, x, recipe)
    return _layer(x, weight, None, None, bias, recipe)


def _dynamic(
    x: Tensor,
    weight: Tensor,
    phis: dict[str, Tensor],
    alphas: dict[str, Tensor] | dict[str, Tensor | float],
    biases: dict[str, Tensor],
    recipe: Recipe,
) -> Tensor:
    """The dynamic layer from its parameters by name, in the order pre, post, res."""
    n, width = recipe.streams, recipe.streams * x.shape[-1]
    shapes = (("[n, n*C]", (n, width)), ("[n, n*C]", (n, width)), ("[n*n, n*C]", (n * n, width)))
    for (name, phi), (axes, shape) in zip(phis.items(), shapes, strict=True):
        check_shape(name, phi, axes, shape, like=x)
    scale = torch.stack([_scalar(name, alpha, x) for name, alpha in alphas.items()])
    return _layer(x, weight, torch.cat(list(phis.values())), scale, _flat_logits(biases, x, recipe), recipe)


def _layer(x: Tensor, weight: Tensor, phi: Tensor | None, scale: Tensor | None, bias: Tensor, recipe: Recipe) -> Tensor:
    check_shape("rmsnorm_weight", weight, "[C]", x.shape[-1:], like=x)
    norm = {"out_norm_weight": weight, "out_norm_eps": recipe.norm_eps}
    x, f, mix = enter(x.float(), phi, scale, bias, recipe=recipe, **norm)
    return leave(x, f, mix, recipe=recipe)


def _recipe(streams: int, iterations: int, eps: float, dynamic: bool) -> Recipe:
    iterations, eps = check_count("sinkhorn_iters", iterations), check_positive_eps(eps)
    return recipe_of("mhc_cu", streams=streams, iterations=iterations, eps=eps, norm_eps=eps, dynamic=dynamic)


def _flat_logits(logits: dict[str, Tensor], x: Tensor, recipe: Recipe) -> Tensor:
    """The [n], [n] and [n, n] logits of pre, post and M as one vector."""
    n = recipe.streams
    shapes = (("[n]", (n,)), ("[n]", (n,)), ("[n, n]", (n, n)))
    for (name, tensor), (axes, shape) in zip(logits.items(), shapes, strict=True):
        check_shape(name, tensor, axes, shape, like=x)
    return torch.cat([tensor.flatten() for tensor in logits.values()])


def _scalar(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return check_scalar(name, value, like)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a torch.Tensor of one element or a number, got {type(value).__name__}")
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _count_streams(x_expanded: Tensor) -> int:
    check_tensor("x_expanded", x_expanded, "[B, n, C]")
    if x_expanded.ndim < 2 or 0 in x_expanded.shape[-2:]:
        raise ValueError(f"x_expanded must be [B, n, C] with n >= 1 and C >= 1, got {tuple(x_expanded.shape)}")
    return x_expanded.shape[-2]
