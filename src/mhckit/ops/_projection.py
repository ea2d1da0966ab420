r"""The residual map "projection": the doubly stochastic matrix that Sinkhorn's iteration tends to, and its gradient.

    R = diag(a) exp(L) diag(b), rows and columns of which sum to 1

It is the only such matrix, and of all doubly stochastic ones the nearest to exp(L) by Kullback-Leibler divergence. With
rows divided by their sums, R[i,j] is the softmax over j of L[i,j] + v[j]. Left to find are potentials v that make the
columns sum to 1: the minimum of a convex function, whose Newton step x solves

    sum_k W[j,k] (x[j] - x[k]) = 1 - sum_i R[i,j]           W[j,k] = sum_i R[i,j] R[i,k]

Far from the solution Newton's method does not know where to go, so it does not begin there. The matrix of s L is
followed from a small s, where R is nearly uniform, to s = 1: v grows by (s' - s) w beside the Newton step, where

    sum_k W[j,k] (w[j] - w[k]) = -sum_k F[j,k](L)           F[j,k](D) = sum_i R[i,j] R[i,k] (D[i,j] - D[i,k])

keeps columns as they are. Then the matrix itself is the state: its columns are multiplied by exp(x), its rows divided
by their sums, so that sums are those of the entries there are and not of logarithms. The number of steps is fixed.

The gradient is that of the limit, not of the steps. From G, that of R,

    dL[i,j] = R[i,j] sum_k R[i,k] (Y[i,j] - Y[i,k])         Y = G - beta
    sum_k W[j,k] (beta[j] - beta[k]) = sum_k F[j,k](G)

These systems are nearly singular where R is nearly a permutation, or falls into blocks. They are Laplacians of graphs
whose nodes are columns, and are solved by eliminating nodes, which only adds products of positive numbers: nothing
cancels, and what two nodes have in common is known to as many digits as the entries of R. Flows F stay between the two
nodes that they belong to for the same reason.

Newton's method on the dual and the implicit gradient were proposed for mHC in arXiv 2606.07574.

Matrices are [S, S, T], as in sinkhorn.py; J, K columns, both N long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS, COLS = 1, 0  # the axis of [S, S, T] that is summed

START = 6.0  # how far apart entries of s L are at the s that is begun with
# Entries that are more than REACH / N below the largest of their row and column count as that far below: what the steps
# reach. exp of that is nothing: R is another only where such an entry would have had a share in it.
REACH = 2048.0
# FOLLOW_STEPS + FOLLOW_STEPS_PER_STREAM N steps of s, then POLISH_STEPS on the matrix. The largest error of a sum among
# 20000 random matrices in float32, for logits of std 3, 10, 30, 100 and 1000:
#     N = 4   20 and 3 steps   2e-7  2e-7  2e-7  2e-7  2e-7      N = 5   22 and 3 steps   3e-7  2e-7  2e-7  2e-7  4e-7
#             20 and 2         2e-7  2e-7  2e-7  2e-7  4e-7              22 and 2         3e-7  3e-7  2e-7  2e-7  6e-7
#             16 and 4         2e-7  2e-7  2e-7  4e-7  4e-7              18 and 4         2e-7  4e-7  2e-7  1e-6  1e-6
# In float64 the same 20 and 3 leave up to 5e-9 at std 100 and 1e-8 at 1000.
FOLLOW_STEPS, FOLLOW_STEPS_PER_STREAM, POLISH_STEPS = 12, 2, 3
LONGEST_STEP = 2.0  # of a potential beside its neighbours': Newton's method overshoots where a column is nearly empty
NOISE = 2.0  # what rounding does to the sum of a column, in last bits of 1
FIXED_POINT = 1024.0  # potentials are multiples of 1 / 1024, so that their sums are exact
LARGEST_LOGIT = 1e37  # beyond it differences overflow in float32; larger ones count as this


def projection(logits_SST: Tensor) -> Tensor:
    """R, for any finite logits."""
    log, lost = _moved_to_zero(logits_SST)
    potentials_KT = _rounded(_follow(log))
    norms = _rounded((log + potentials_KT).logsumexp(ROWS, keepdim=True))
    matrix = ((log - (norms - potentials_KT)) + lost).exp()
    for _ in range(POLISH_STEPS):
        matrix = _rows_divided(matrix)
        matrix = matrix * _newton_step(_eliminate(_weights(matrix)), matrix).exp()
    return _rows_divided(matrix)


def projection_backward(dmatrix: Tensor, matrix: Tensor) -> Tensor:
    """The gradient of the logits from those of R, and R."""
    y = dmatrix - _balance(_eliminate(_weights(matrix)), matrix, dmatrix)
    return matrix * (matrix[:, None] * (y[:, :, None] - y[:, None])).sum(2)


def _moved_to_zero(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits less the largest of each row, then of each column, and what rounding took away from that."""
    log = logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    lost = torch.zeros_like(log)
    for axis in (ROWS, COLS):
        log, lost = _subtract(log, lost, log.amax(axis, keepdim=True))
    lowest = -REACH / len(log)
    return log.clamp(min=lowest), torch.where(log > lowest, lost, 0).clamp(-1, 1)


def _subtract(a: Tensor, lost: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b, and lost with its rounding error, which is exact (Knuth's two-sum)."""
    difference = a - b
    minus_b = difference - a
    return difference, lost + ((a - (difference - minus_b)) - (b + minus_b))


def _rounded(potentials: Tensor) -> Tensor:
    return (potentials * FIXED_POINT).round() / FIXED_POINT


def _follow(log: Tensor) -> Tensor:
    """Potentials [K, T] at s = 1, to a percent or so."""
    steps = FOLLOW_STEPS + FOLLOW_STEPS_PER_STREAM * len(log)
    scale = START / (-log.amin((ROWS, COLS))).clamp(min=START)
    ratio = scale ** (-1 / steps)
    slopes = -log.mean(COLS)  # where R is uniform
    potentials = scale * slopes
    for step in range(steps):
        matrix = (scale * log + potentials).softmax(ROWS)
        elimination = _eliminate(_weights(matrix))
        slopes = slopes - _balance(elimination, matrix, log + slopes)
        next_scale = scale * ratio if step < steps - 1 else torch.ones_like(scale)
        potentials = potentials + _newton_step(elimination, matrix) + (next_scale - scale) * slopes
        scale = next_scale
    return potentials


def _rows_divided(matrix: Tensor) -> Tensor:
    return matrix / matrix.sum(ROWS, keepdim=True)


def _weights(matrix: Tensor) -> Tensor:
    """W [J, K, T]; what is on its diagonal means nothing."""
    return (matrix[:, :, None] * matrix[:, None]).sum(0)


class _Eliminated(NamedTuple):
    """A node: the sum of its weights to those that remain, and their shares of it [K, T]."""

    degree: Tensor
    shares: Tensor


def _eliminate(weights_JKT: Tensor) -> list[_Eliminated]:
    """The nodes but the last, first to last. Those that remain are joined through the one that goes."""
    nodes = []
    while len(weights_JKT) > 1:
        degree = weights_JKT[0, 1:].sum(0).clamp(min=torch.finfo(weights_JKT.dtype).tiny)
        shares = weights_JKT[0, 1:] / degree
        nodes.append(_Eliminated(degree, shares))
        weights_JKT = weights_JKT[1:, 1:] + weights_JKT[1:, :1] * shares
    return nodes


def _put_back(nodes: list[_Eliminated], above: list[Tensor], like_T: Tensor) -> Tensor:
    """[K, T]: every node from those that were eliminated after it, and how far it is above their weighted mean."""
    values = torch.zeros_like(like_T)[None]
    for node, own in zip(reversed(nodes), reversed(above), strict=True):
        values = torch.cat([((node.shares * values).sum(0) + own)[None], values])
    return values


def _balance(nodes: list[_Eliminated], matrix: Tensor, d: Tensor) -> Tensor:
    """beta [K, T]: sum_k W[j,k] (beta[j] - beta[k]) = sum_k F[j,k](d)."""
    flows_JKT = (matrix[:, :, None] * matrix[:, None] * (d[:, :, None] - d[:, None])).sum(0)
    above = []
    for node in nodes:
        above.append(flows_JKT[0, 1:].sum(0) / node.degree)
        onward = flows_JKT[1:, :1] * node.shares
        flows_JKT = flows_JKT[1:, 1:] + (onward - onward.transpose(0, 1))
    return _put_back(nodes, above, matrix[0, 0])


def _newton_step(nodes: list[_Eliminated], matrix: Tensor) -> Tensor:
    """x [K, T]. What rounding added to all rows is shared by the columns, or the last one would have it all. Where two
    parts of the graph have less in common than rounding leaves of their sums, there is no step between them: it would
    be noise.
    """
    noise = NOISE * torch.finfo(matrix.dtype).eps
    missing_KT = 1 - matrix.sum(COLS)
    missing_KT = missing_KT - missing_KT.mean(0)
    above = []
    for node in nodes:
        step = missing_KT[0] * node.degree / (node.degree.square() + noise**2)
        above.append(step.clamp(-LONGEST_STEP, LONGEST_STEP))
        missing_KT = missing_KT[1:] + node.shares * missing_KT[0]
    return _put_back(nodes, above, matrix[0, 0])
