"""Products of 8 x 8 matrices, one of each token, on tensor cores.

A warp holds a matrix as its tensor cores take a part of an operand: lane 4 r + c has columns 2 c and 2 c + 1 of row r.
A tensor [512, 8] in the layout MATRICES is a matrix of each of 64 tokens, of which eight warps have eight each.

    transposed(a)                               a^T                                         a of bfloat16
    add_products(y, z, a, b, c)                 y + a c^T and z + b c^T                     y and z of float32
    add_products_with_sum(y, z, a, b, c, d)     y + a (c + d)^T and z + b (c + d)^T         the others of bfloat16
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MATRICES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[64, 0], [128, 0], [256, 0]],
        block_bases=[],
        shape=[512, 8],
    )
)


@gluon.jit
def transposed(a):
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [a], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def add_products(y, z, a, b, c):
    """One instruction for each token: a and b are the upper and the lower half of its left operand."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$8, $9}, {$10}, {$4, $5, $6, $7};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r",
        [y, z, a, b, c],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def add_products_with_sum(y, z, a, b, c, d):
    """One instruction, too: its left operand has a and b twice, side by side. It takes less time than two products."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$8, $9, $8, $9}, {$10, $11}, "
        "{$4, $5, $6, $7};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [y, z, a, b, c, d],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=2,
    )
