"""Coefficients of tokens in kernels for Hopper: columns [rows, 1], from memory that the L1 cache has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._device import join_last, load_float, split_last


@gluon.jit
def load_columns(pointer, row, live, COUNT: gl.constexpr):
    """`load_per_token` with loads as wide as there are: COUNT, a power of two, numbers of each row.

    live: None where all rows exist.
    """
    like = ()
    for _ in gl.static_range(COUNT):
        like = like + (row,)
    layout: gl.constexpr = gl.reshape(join_last(like), (row.shape[0], COUNT)).type.layout
    rows = gl.convert_layout(row, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    offsets = rows * COUNT + gl.arange(0, COUNT, gl.SliceLayout(0, layout))[None, :]
    if live is None:
        wide = gl.load(pointer + offsets).to(gl.float32)
    else:
        exists = gl.convert_layout(live, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
        wide = load_float(pointer, offsets, exists)
    values = split_last(wide, COUNT)
    columns = ()
    for k in gl.static_range(COUNT):
        columns = columns + (gl.convert_layout(values[k], row.type.layout, assert_trivial=True)[:, None],)
    return columns
