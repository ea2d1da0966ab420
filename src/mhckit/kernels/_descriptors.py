"""Tensors that a kernel moves tile by tile with Hopper's copy engine, which wants them described by the host.

Launches, plans and warm-ups know tensors and pointers alone. What is described, and how, is written down once for each
such kernel, in `tiled_arguments`, and done last, where Triton or its driver takes the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Descriptions of an argument that are kept, about half a kilobyte each: more than a model has sublayers, even where the
# number of tokens changes now and then.
MOST_REMEMBERED = 1024


class Tiles(NamedTuple):
    """A matrix in memory, row by row without gaps, and the tile of it that a copy moves."""

    shape: tuple[int, int]
    tile: tuple[int, int]


# By a kernel's name: from the arguments of a launch and its constants, the arguments to describe, by their position.
tiled_arguments: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], dict[int, Tiles]]] = {}


class _Pointer:
    """A matrix as Triton's driver looks at it."""

    __slots__ = ("pointer", "shape", "strides")
    padding = "zero"

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.pointer = pointer
        self.shape = shape
        self.strides = (shape[1], 1)

    @property
    def base(self) -> _Pointer:
        return self

    def data_ptr(self) -> int:
        return self.pointer


def described(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments as Triton takes them when it compiles."""
    tiles_of = tiled_arguments.get(kernel.__name__)
    if tiles_of is None:
        return args
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    arguments = list(args)
    for position, (shape, tile) in tiles_of(args, constants).items():
        tensor = args[position]
        layout = shared_layout(tensor.element_size(), tile[1])
        arguments[position] = TensorDescriptor(tensor, list(shape), [shape[1], 1], list(tile), layout)
    return tuple(arguments)


def shared_layout(element_size: int, columns: int) -> Any:
    """How a tile with so many columns lies in shared memory: as tensor cores read it, rows of up to 128 bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    width = min(128, columns * element_size)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * element_size, rank=2)


def describing(run: Callable[..., None], kernel: Any, settings: int, constants: dict[str, Any]) -> Callable[..., None]:
    """A driver's launch of a compiled kernel that takes tensors or pointers; of so many settings behind the stream."""
    tiles_of = tiled_arguments.get(kernel.__name__)
    if tiles_of is None:
        return run
    before = 4 + settings  # the grid and the stream
    behind = _behind(run)
    if behind is not None:
        return _remembering(*behind, tiles_of, before, kernel.arg_names.index("T"), constants)

    def launch(*values: Any) -> None:
        arguments = list(values)
        for position, (shape, _tile) in tiles_of(values[before:], constants).items():
            arguments[before + position] = _Pointer(_address(arguments[before + position]), shape)
        run(*arguments)

    return launch


def _behind(run: Callable[..., None]) -> tuple[Callable[..., None], list[Any]] | None:
    """The launch that Triton's driver wraps to describe tensors, and what it knows of each; None if it is not so."""
    found = inspect.getclosurevars(run).nonlocals if inspect.isfunction(run) else {}
    if not {"launcher", "tensordesc_meta"} <= found.keys():
        return None
    return found["launcher"], found["tensordesc_meta"]


def _remembering(
    run: Callable[..., None],
    metadata: list[Any],
    tiles_of: Callable[[tuple[Any, ...], dict[str, Any]], dict[int, Tiles]],
    before: int,
    tokens_at: int,
    constants: dict[str, Any],
) -> Callable[..., None]:
    """Describes a tensor once for each address and number of tokens, of which its description is made. A model in
    training comes by the same addresses in every step.
    """
    from triton.backends.nvidia import driver

    known: list[dict[tuple[int, int], list[Any]]] = [{} for _ in metadata]
    last_first: list[tuple[int, int]] | None = None

    def launch(*values: Any) -> None:
        nonlocal last_first
        if last_first is None:
            positions = sorted(tiles_of(values[before:], constants))
            last_first = [(number, before + position) for number, position in enumerate(positions)][::-1]
        arguments, tokens = list(values), values[before + tokens_at]
        for number, at in last_first:
            key = (_address(values[at]), tokens)
            description = known[number].get(key)
            if description is None:
                if len(known[number]) >= MOST_REMEMBERED:
                    known[number].clear()
                shape = tiles_of(values[before:], constants)[at - before].shape
                description = driver.make_tensordesc_arg(_Pointer(key[0], shape), metadata[number])
                known[number][key] = description
            arguments[at : at + 1] = description
        run(*arguments)

    return launch


def _address(tensor: Any) -> int:
    return tensor if isinstance(tensor, int) else tensor.data_ptr()


def signature_of(tensor_type: str, tile: Sequence[int], element_size: int) -> str:
    """The type that Triton gives a described tensor."""
    return f"tensordesc<{tensor_type}{list(tile)},{shared_layout(element_size, tile[-1])!r}>"
