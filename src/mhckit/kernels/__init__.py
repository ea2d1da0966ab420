"""Triton kernels, one module per operator, imported by name on first use.

A module ``mhckit.kernels.<op>`` defines ``<op>_fwd`` and ``<op>_bwd`` with the arguments of the operators of that name
(the contract is in ``mhckit/ops/_register.py``), and ``<op>`` joins ``KERNELS`` in ``mhckit/ops/_backend.py``. There
are none in this version: every device runs the torch reference.
"""
