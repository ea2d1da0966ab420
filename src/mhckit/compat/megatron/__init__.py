r"""Megatron-LM's mHC: the fused functions, the native ones beside them, and HyperConnectionModule.

    proj_rms      proj = x W^T                                   r = 1 / (||x|| / sqrt(K) + eps)
    compute_h     l = r proj alpha[group] + bias                 h_pre = sigmoid(l) + eps      h_post = 2 sigmoid(l)
    sinkhorn      R = softmax(l) + eps, columns; then `num_iterations - 1` times rows, columns; / (sum + eps)
    h_aggregate   out[c] = sum_i h_pre[i] x[i,c]
    h_post_bda    out[o,c] = sum_i h_res[i,o] residual[i,c] + h_post[o] (x[c] + bias[c])

s, b tokens; n streams, i in and o out; C channels; K = n*C; W [n*n + 2n, K], rows n pre, n post, n*n res. So h_res is
[in, out]: Megatron multiplies the streams by its transpose.

The names come from ``megatron.core.fusions.fused_mhc_kernels`` and ``megatron.core.transformer.hyper_connection``, with
the math that Megatron has had since its pull request 4624. Before that h_res was applied untransposed, Sinkhorn started
from exp(l - rowmax) and h_pre had no eps: a checkpoint of that time is wrong here, see ``Recipe.preset("megatron")``.

What differs on purpose:
- Streams may be [s, b, n, C], as there, or flat, [s, b, n*C]; the result has the shape of the argument.
- Results have the dtype of the streams, where Megatron's kernels take the dtype of h_res; n need not be a power of two.
- ``backend``: "native" takes the native function; "auto", "triton" and "cutile" all take mhckit's operators, on any
  device. Those sum in float32 and are deterministic; the native functions compute in the dtype they are given.
- A token of zeros has zero gradient through r, not NaN, and none of the functions waits for the GPU.
- HyperConnectionModule is a plain nn.Module that imports nothing of Megatron: no sharded state dict, no recompute
  manager (use torch.utils.checkpoint), no single-pass mHC (``Recipe.preset("deepseek_v41")``).
"""

from ._functions import (
    fused_h_aggregate,
    fused_h_post_bda,
    fused_proj_rms,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
)
from ._module import HyperConnectionModule
from ._native import native_h_aggregate, native_h_post_bda, native_proj_rms, native_sinkhorn

__all__ = [
    "HyperConnectionModule",
    "fused_h_aggregate",
    "fused_h_post_bda",
    "fused_proj_rms",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "native_h_aggregate",
    "native_h_post_bda",
    "native_proj_rms",
    "native_sinkhorn",
]
