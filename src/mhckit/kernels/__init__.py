"""Triton kernels, one module per operator, imported by name on first use.

A module ``mhckit.kernels.<op>`` defines ``<op>_fwd`` and ``<op>_bwd`` with the arguments of the operators of that name
(the contract is in ``mhckit/ops/_register.py``). They allocate and launch; the kernels themselves are few, and serve
all operators with parts left out:

    _write_project    F1   y = H x + post f, and partial sums of y phi^T; with many tokens, and where rows begin
                           anywhere, `_write_project_hopper`; with eight streams `_write_project_eight`
    _read             F2   coefficients from these sums, and the collapse x_in = w . y
    _read_bwd         B    backward of F2 up to the logits
    _streams_bwd      J    gradient of y from all its uses, through the write-back to dx, df, dH, dpost; where it can,
                           as `_streams_bwd_hopper`, with eight streams `_streams_bwd_eight`
    _parameters_bwd   P    dphi and other sums over tokens, and the last kernel, which ends every sum left in slots
    _pack                  phi (and a dz that B did not make) as bfloat16 parts, for J and P

Inside, one contiguous layout, float32 arithmetic, 64-bit token offsets, no atomics; the number of tokens is never a
compile-time constant, and what a token gets does not depend on which others are in the batch.
"""
