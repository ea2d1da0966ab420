"""What a checkpoint holds: weights, the optimizer's state and the random generators, by torch.distributed.checkpoint.

    model.<parameter>      optimizer.state.<parameter>.<name>      optimizer.param_groups.<index>.<option>
    rng.<rank>.cpu         rng.<rank>.cuda

Names of parameters do not depend on FSDP2, DDP or torch.compile, and DCP cuts tensors anew: what one number of
processes wrote, another reads.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from .description import PlainPlanner, PlainReader, alone_is_no_mistake, check_tensors, reason_of
from .together import rank_and_world

MODEL, OPTIMIZER, STATE, GROUPS, RNG = "model", "optimizer", "state", "param_groups", "rng"
SHOWN_NAMES = 4


def write_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Everything into the folder, each process its part, flushed to the disk; changes nothing in memory."""
    rank, _ = rank_and_world()
    state: dict[str, Any] = {MODEL: get_model_state_dict(model), RNG: {str(rank): _generator_states(model)}}
    # Asked for state that it does not have yet, torch makes the optimizer take a step, which then counts.
    if any(optimizer.state.values()):
        state[OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
    try:
        with alone_is_no_mistake():
            state_dict_saver.save(state, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # a BaseException, which no one expects
        raise RuntimeError(f"{folder} could not be written: {reason_of(error)}") from error


def own_files(folder: Path) -> list[Path]:
    """What this process wrote."""
    rank, _ = rank_and_world()
    return [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]


def read_state(folder: Path, files: Collection[str], model: nn.Module, optimizer: Optimizer) -> None:
    """Everything from these files of the folder. Raises ValueError, before anything changes, for weights of other names
    or shapes.
    """
    reader = PlainReader(folder, files)
    stored = reader.read_metadata().state_dict_metadata
    check_tensors(folder, stored, MODEL)
    check_tensors(folder, stored, RNG)
    weights = get_model_state_dict(model)
    _check_names(folder, "weights", {f"{MODEL}.{name}" for name in weights}, {n for n in stored if _is_in(MODEL, n)})
    _check_shapes(folder, weights, stored)
    optimizer.zero_grad(set_to_none=True)  # with gradients around, torch does not prepare the state to read into
    optimizer.state.clear()
    state: dict[str, Any] = {MODEL: weights}
    has_optimizer = any(_is_in(OPTIMIZER, name) for name in stored)
    content: dict[str, Any] = {}
    if has_optimizer:
        content = _prepare_optimizer(folder, model, optimizer, stored)
        # Objects first: where one is refused, the weights, which are read in place, are still as they were.
        _read_into(folder, {OPTIMIZER: {GROUPS: content[GROUPS]}}, reader)
        state[OPTIMIZER] = {STATE: content[STATE]}
    rank, _ = rank_and_world()
    generators = {kind: s for kind, s in _generator_states(model).items() if f"{RNG}.{rank}.{kind}" in stored}
    if generators:
        state[RNG] = {str(rank): generators}
    _read_into(folder, state, reader)
    set_model_state_dict(model, weights)
    if has_optimizer:
        _set_optimizer(folder, model, optimizer, content)
    _set_generators(model, generators)


def _read_into(folder: Path, state: dict[str, Any], reader: PlainReader) -> None:
    """Fill the tensors of a state dict."""
    try:
        with alone_is_no_mistake():
            state_dict_loader.load(state, storage_reader=reader, planner=PlainPlanner())
    except CheckpointException as error:
        raise ValueError(f"{folder} could not be loaded: {reason_of(error)}") from error


def _prepare_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state dict, to read into, without what the checkpoint does not have.

    That is the state of parameters that no gradient had reached, and options of groups that another version of torch
    does not know.
    """
    content: Any = get_optimizer_state_dict(model, optimizer)
    prefix = f"{OPTIMIZER}.{STATE}"
    content[STATE] = {
        name: state
        for name, state in content[STATE].items()
        if any(f"{prefix}.{name}.{kind}" in stored for kind in state)
    }
    wanted = {f"{prefix}.{name}.{kind}" for name, state in content[STATE].items() for kind in state}
    _check_names(folder, "optimizer state", wanted, {name for name in stored if _is_in(prefix, name)})
    prefix = f"{OPTIMIZER}.{GROUPS}"
    content[GROUPS] = [
        {option: value for option, value in group.items() if f"{prefix}.{index}.{option}" in stored}
        for index, group in enumerate(content[GROUPS])
    ]
    return content


def _set_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer, content: dict[str, Any]) -> None:
    live: Any = get_optimizer_state_dict(model, optimizer)
    groups = list(zip(live[GROUPS], content[GROUPS], strict=True))
    if any(here["params"] != there.get("params") for here, there in groups):
        raise ValueError(f"{folder} must have the optimizer's groups of parameters, and has others")
    # torch wants an entry for every parameter; an empty one is that of a parameter without state.
    state = {name: content[STATE].get(name, {}) for name in live[STATE]}
    set_optimizer_state_dict(model, optimizer, {STATE: state, GROUPS: [here | there for here, there in groups]})


def _generator_states(model: nn.Module) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    device = _device(model)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(model: nn.Module, states: dict[str, Tensor]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], _device(model))


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _is_in(prefix: str, name: str) -> bool:
    return name.startswith(f"{prefix}.")


def _check_names(folder: Path, what: str, wanted: set[str], stored: set[str]) -> None:
    for names, problem in ((wanted - stored, "lacks"), (stored - wanted, "has, unlike the model,")):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
            raise ValueError(f"{folder} is of another model: of the {what}, it {problem} {shown}")


def _check_shapes(folder: Path, weights: dict[str, Any], stored: dict[str, Any]) -> None:
    for name, weight in weights.items():
        facts = stored[f"{MODEL}.{name}"]
        if isinstance(facts, TensorStorageMetadata) and facts.size != weight.shape:
            raise ValueError(
                f"{folder} is of another model: {name} must be {tuple(weight.shape)}, got {tuple(facts.size)}"
            )
