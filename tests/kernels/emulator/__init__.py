"""A GPU of Hopper's kind, emulated: what Triton compiled, run instruction by instruction, without a GPU.

Triton's interpreter runs the source of kernels written in plain Triton. Kernels written in Gluon, whose warps drive the
copy engine and wait for each other at barriers in shared memory, it cannot run; and what the compiler makes of either,
it does not see. This package takes the compiled PTX of a launch and runs all its programs and warps on numpy arrays of
32 lanes, about a million instructions of a warp in three seconds.

It sees more than a GPU would show. Shared memory begins as NaN. Every access to it, by a warp, the copy engine or the
tensor cores, is checked against those before it: unless barriers order the two, it is a hazard, whether or not it
happens to work (`hazards`). A fence that is missing between a warp's stores and what the copy engine or the tensor
cores read is one, too. A tensor may not lie where a barrier does. No two warps may write the same byte of memory, and
what is read has to exist. Warps take turns in an order drawn by lot. Where none can go on, they hang.

    gpu             launches of operators: compiled and decoded once
    launch          what a kernel is given, and all programs of a grid
    program         a program's warps, whose turn it is, and the barriers they wait at
    hazards         accesses to shared memory that nothing orders
    memory          of the device, and shared; copies: the copy engine's tiles; matrices: what tensor cores multiply
    ptx             text to instructions
    decode          instructions to functions of a warp: accesses, exchanges and products, and arithmetic for the rest
    registers       where instructions find what they take

What it does not show: time; caches and the order of writes to global memory; lanes of a warp that overtake each other;
stores of equal values that nothing orders; the last bits of approximate functions and of sums in the tensor cores. What
it does not know it refuses: instructions, types, modifiers and guards that no kernel here has.
"""
