"""Compile the kernels for GPUs this machine does not have, and read what the compiler made of them.

    python tools/crosscompile.py sass --operator junction --channels 4096          one operator, in detail
    python tools/crosscompile.py check --everything                                 all configurations, all targets

Launches are not written down here: the operators run for real on CPU tensors, with the launch of each kernel recorded
instead of made. So what is compiled is what a GPU would be asked to run: its constants, types and options.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.pop("TRITON_INTERPRET", None)  # compile, even where tests interpret

import torch
import triton
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

import mhckit
from mhckit import Recipe
from mhckit.kernels import _launcher, _runtime, _streams_bwd, _write_project
from mhckit.kernels._descriptors import Tiles, signature_of, tiled_arguments
from mhckit.testing import OPERATORS, make_call

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Kernels that are as fast where rows begin anywhere, and C is no multiple of 8, as their warps are together.
ROWS_BEGIN_ANYWHERE = ("write_project_hopper", "streams_bwd_hopper")
INSTRUCTIONS = ("FFMA", "FMUL", "FADD", "MUFU", "HMMA", "HGMMA", "SHFL", "LDG", "STG", "LDL", "STL", "BAR")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch: a kernel with the types and constants of its arguments, and its options."""

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def kernel(self) -> JITFunction:
        return getattr(importlib.import_module(self.module), self.function)

    @property
    def name(self) -> str:
        return self.function.strip("_").removesuffix("_kernel")

    def runs_on(self, target: str) -> bool:
        """What is written for one generation of GPUs has another form elsewhere."""
        return target == "sm_90" or not self.kernel.is_gluon()

    @property
    def variant(self) -> str:
        """What tells this launch from others of the kernel."""
        shown = (f"{k}={v}" for k, v in (*self.constants, *self.options) if v is not None and k != "PRECISION")
        return " ".join(shown)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came out: registers and stack are None where no tool can read them (AMD)."""

    name: str
    variant: str
    target: str
    shared: int
    registers: int | None
    stack: int | None
    instructions: dict[str, int]
    fused_sums: int
    lost_truncations: int
    loads_first: bool
    seconds: float


def record(run: Any) -> list[Launch]:
    """The launches that run() would make, each once."""
    launches: dict[Launch, None] = {}

    def remember(kernel: JITFunction, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        for form in _launcher.forms(kernel, args, constants):
            launches[launch_of(form.kernel, args, form.constants)] = None

    with launches_go_to(remember):
        run()
    return list(launches)


@contextlib.contextmanager
def launches_go_to(observer: Callable[..., None]) -> Iterator[None]:
    """Operators on CPU tensors hand their launches to an observer instead of a GPU."""
    saved = _launcher.observer, _runtime.check
    _launcher.observer, _runtime.check = observer, lambda device: None
    try:
        with mhckit.backend("triton"):
            yield
    finally:
        _launcher.observer, _runtime.check = saved


def tiles_of(kernel: JITFunction, args: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Tiles]:
    """The arguments that the copy engine moves, by name."""
    positions = tiled_arguments.get(kernel.__name__, lambda args, constants: {})(args, constants)
    return {kernel.arg_names[position]: each for position, each in positions.items()}


def launch_of(kernel: JITFunction, args: tuple[Any, ...], given: dict[str, Any]) -> Launch:
    """Of a kernel with its arguments and the constants behind them."""
    bound, tiles = dict(zip(kernel.arg_names, args, strict=False)) | given, tiles_of(kernel, args, given)
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        name, value = parameter.name, bound[parameter.name]
        if parameter.is_constexpr or value is None:
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif name in tiles:
            kind = signature_of(_TYPES[value.dtype], tiles[name].tile, value.element_size())
            signature.append((name, kind))
        elif isinstance(value, torch.Tensor):
            signature.append((name, f"*{_TYPES[value.dtype]}"))
            aligned.append(name)
        else:
            signature.append((name, "fp32" if isinstance(value, float) else "i32"))
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(name)
    options = tuple((name, bound[name]) for name in ("num_warps", "num_stages", "launch_pdl") if name in bound)
    return Launch(kernel.__module__, kernel.__name__, tuple(signature), tuple(constants), tuple(aligned), options)


def build(launch: Launch, target: str) -> CompiledKernel:
    constants = dict(launch.constants)
    if target.startswith("gfx"):
        constants |= {name: value for name, value in {"PRECISION": "ieee", "PTX": False}.items() if name in constants}
    options = dict(launch.options)
    if target in ("sm_80", "gfx942") and "EARLY" in constants:  # as `starts_early` has it
        constants["EARLY"] = False
        options.pop("launch_pdl", None)
    if target != "sm_90" and "ASYNCHRONOUS" in constants:  # as `dots_are_asynchronous` has it
        constants["ASYNCHRONOUS"] = False
    if target not in ("sm_80", "sm_90") and constants.get("PACKED") and "IN_THREAD" in constants:
        constants["IN_THREAD"] = False  # as `dots_stay_in_threads` has it
    kernel = launch.kernel
    names = kernel.arg_names
    source = _source_class(kernel)(
        fn=kernel,
        signature=dict(launch.signature),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    return triton.compile(source, target=TARGETS[target], options=options)


def compile_launch(launch: Launch, target: str) -> Compiled:
    start = time.perf_counter()
    binary = build(launch, target)
    seconds = time.perf_counter() - start
    registers = stack = None
    assembly: list[str] = []
    if "cubin" in binary.asm:
        registers, stack = _resources(binary.asm["cubin"])
        assembly = _disassemble(binary.asm["cubin"])
    return Compiled(
        name=launch.name,
        variant=launch.variant,
        target=target,
        shared=binary.metadata.shared,
        registers=registers,
        stack=stack,
        instructions=_instructions(assembly),
        fused_sums=_fused_sums(assembly),
        lost_truncations=_lost_truncations(binary.asm.get("ptx", "")),
        loads_first=_loads_first(binary.asm["ttgir"]),
        seconds=seconds,
    )


def _source_class(kernel: JITFunction) -> type[ASTSource]:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack, where spilled registers go."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "--dump-resource-usage", cubin))
    assert found, "cuobjdump printed no resource usage"
    return int(found[1]), int(found[2])


def _disassemble(cubin: bytes) -> list[str]:
    """Instructions with their operands, without predicates."""
    text = _tool("nvdisasm", "-c", cubin)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", text, re.M)


def _instructions(assembly: list[str]) -> dict[str, int]:
    counts = Counter(re.split(r"[. ]", instruction, maxsplit=1)[0] for instruction in assembly)
    return {name: counts[name] for name in INSTRUCTIONS} | {"all": len(assembly)}


def _fused_sums(assembly: list[str]) -> int:
    """How often a term from another thread is added by an FFMA: a product fused into a sum across threads.

    Copies of such a sum differ in their last bit between threads (see rounded_product in mhckit/kernels/_device.py).
    """
    count = 0
    for i, instruction in enumerate(assembly):
        shuffle = re.match(r"SHFL\.BFLY \w+, (R\d+)", instruction)
        if shuffle is None:
            continue
        for later in assembly[i + 1 :]:
            opcode, _, operands = later.partition(" ")
            target, *sources = [re.sub(r"[-|~]|\..*", "", operand.strip()) for operand in operands.split(",")]
            if shuffle[1] in sources:
                count += opcode.startswith("FFMA")
                break
            if target == shuffle[1]:
                break
    return count


def _lost_truncations(ptx: str) -> int:
    """How often a 32-bit shift was widened to 64 bits, and what it should have shifted out is used.

    LLVM as in Triton 3.6 does so with a funnel shift: of the offsets (program % 3) * 256 + (thread * 4) % 256 the bits
    of the thread beyond 256 came back. Seen in this package once, as a misaligned address, with 3 tiles of channels.
    """
    widened, joined, count = set(), set(), 0
    for line in ptx.splitlines():
        if found := re.match(r"\s*mul\.wide\.u32\s+(%rd\d+), %r\d+, (\d+);", line):
            widened |= {found[1]} if int(found[2]) >= 1 << 16 else set()
        elif found := re.match(r"\s*or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);", line):
            joined |= {found[1]} if {found[2], found[3]} & widened else set()
        elif found := re.match(r"\s*mov\.b64\s+\{_, %r\d+\}, (%rd\d+);", line):
            count += found[1] in joined
    return count


def _loads_first(ttgir: str) -> bool:
    """Whether a loop begins all loads of its next step before its first dot."""
    _, _, loop = ttgir.partition("scf.for")
    dot = re.search(r"ttng\.warp_group_dot |tt\.dot ", loop)
    return dot is None or "ttg.async_copy_global_to_local" not in loop[dot.start() :]


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Run one of the binary tools that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a set of launches is compiled for.

    dtypes: a name of DTYPES, or "streams/sublayer" as in "fp32/bf16". optional: with norms and biases, but for those
    that are named in `without`. partial: also backward with the gradients of the first and of the last output alone.
    hopper_forms: whether kernels that are written for Hopper may take the place of others.
    """

    operators: tuple[str, ...]
    recipe: Recipe
    channels: int = 4096
    dtypes: str = "bf16"
    optional: bool = True
    without: tuple[str, ...] = ()
    partial: bool = False
    hopper_forms: bool = True
    targets: tuple[str, ...] = ("sm_90",)


def launches_of(operator: str, case: Configuration) -> list[Launch]:
    """Forward and backward of one operator."""
    streams, _, sublayer = case.dtypes.partition("/")
    call = make_call(
        operator, case.recipe, lead=(3,), channels=case.channels, dtype=DTYPES[streams], optional=case.optional
    )
    tensors = {name: tensor for name, tensor in call.tensors.items() if name not in case.without}
    if sublayer and "f" in tensors:
        tensors["f"] = tensors["f"].to(DTYPES[sublayer])
    call = dataclasses.replace(call, tensors=tensors)

    def run() -> None:
        for kept in (slice(None), slice(0, 1), slice(-1, None)) if case.partial else (slice(None),):
            outputs = call.requires_grad()()[kept]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    if case.hopper_forms:
        return record(run)
    with contextlib.ExitStack() as stack:
        for module in (_write_project, _streams_bwd):
            stack.enter_context(unittest.mock.patch.object(module, "has_hopper_forms", lambda device: False))
        return record(run)


_JUNCTION = ("junction",)
_SPINE = ("junction", "enter", "head", "post", "pre", "project", "expand")
_ALL = tuple(OPERATORS)
_OTHER_TARGETS = ("sm_80", "sm_100", "gfx942")
# Presets that compile to different code; the others differ from one of these in the value of an eps.
_KINDS = ("paper", "deepseek_v4", "deepseek_v41", "hy_v4", "megatron", "mhc_cu", "mhc_triton", "mhc_lite", "hc")


def configurations(everything: bool) -> list[Configuration]:
    """Every kind of recipe at N = 4 on sm_90, and a sample of (or everything of) the rest."""
    dynamic = Recipe.presets() if everything else _KINDS
    static = Recipe.presets() if everything else ("paper", "hy_v4")
    every = [*(Recipe.preset(name) for name in dynamic), Recipe(residual="projection")]
    every += [Recipe.preset(name, dynamic=False) for name in static]
    deepseek = Recipe.preset("deepseek_v4")
    listed = [Configuration(("junction", "enter") if everything else _JUNCTION, recipe) for recipe in every]
    listed += [Configuration(_ALL, deepseek, optional=optional, partial=not optional) for optional in (True, False)]
    listed.append(Configuration(_JUNCTION, deepseek, optional=False, hopper_forms=False))
    # J has a form for Hopper unless there is a bias; with a norm, it sums no gradient of given weights.
    normed = every if everything else [deepseek, Recipe.preset("mhc_lite")]
    listed += [Configuration(_JUNCTION, recipe, without=("f_bias",)) for recipe in normed]
    for recipe in every if everything else map(Recipe.preset, ("deepseek_v41", "hy_v4")):
        listed.append(Configuration(_JUNCTION, recipe, without=("f_bias", "out_norm_weight")))
    spine = _SPINE if everything else ("junction", "head")
    listed += [Configuration(spine, deepseek, dtypes=dtypes) for dtypes in ("fp32", "fp16", "fp32/bf16")]
    listed += [Configuration(spine, deepseek, channels=37), Configuration(_JUNCTION, deepseek, channels=5129)]
    plain = map(Recipe.preset, ("deepseek_v4", "deepseek_v41", "hy_v4"))
    listed += [Configuration(_JUNCTION, recipe, channels=5129, optional=False) for recipe in plain]
    for recipe in (deepseek, Recipe.preset("mhc_lite")):
        listed.append(Configuration(_JUNCTION, recipe, channels=5130, without=("f_bias",)))
    for recipe in (deepseek, Recipe.preset("deepseek_v41")):
        eight = recipe.replace(streams=8)
        listed.append(Configuration(_JUNCTION, eight, without=("f_bias", "out_norm_weight")))
    listed.append(Configuration(_JUNCTION, deepseek.replace(streams=8), without=("f_bias",)))
    if not everything:
        for n, channels in ((2, 2048), (3, 520), (5, 2048)):
            listed.append(Configuration(_JUNCTION, deepseek.replace(streams=n), channels=channels))
        listed.append(Configuration(_JUNCTION, deepseek, channels=12288))
        listed.append(Configuration(("junction", "post"), deepseek, channels=32, optional=False))
        return [*listed, Configuration(_JUNCTION, deepseek, targets=_OTHER_TARGETS)]
    for recipe, dtypes in itertools.product(every, ("bf16", "fp16", "fp32", "fp32/bf16")):
        listed.append(Configuration(_ALL, recipe, dtypes=dtypes))
    for n, dtypes in itertools.product(range(1, 9), ("bf16", "fp32")):
        listed.append(Configuration(_SPINE, deepseek.replace(streams=n), channels=2048, dtypes=dtypes))
    for n, channels in itertools.product((2, 3, 4, 5), (520, 640, 776, 1280)):
        listed.append(Configuration(_SPINE, deepseek.replace(streams=n), channels=channels))
    lite = Recipe.preset("mhc_lite", streams=5)
    listed.append(Configuration(_SPINE, lite, channels=2048, targets=("sm_90", *_OTHER_TARGETS)))
    listed.append(Configuration(_JUNCTION, Recipe(residual="projection", streams=8), channels=2048))
    for n, channels in itertools.product((4, 8), (8, 16, 32, 64, 128)):
        listed.append(Configuration(_SPINE, deepseek.replace(streams=n), channels=channels, optional=False))
    return [*listed, Configuration(_ALL, deepseek, targets=_OTHER_TARGETS)]


def work(listed: list[Configuration]) -> list[tuple[Launch, str]]:
    """Every launch of these configurations on each of its targets, once."""
    unique: dict[tuple[Launch, str], None] = {}
    for each in track(listed, "recording launches", console=_console()):
        for operator in each.operators:
            if operator == "sinkhorn" and each.recipe.residual == "identity":
                continue
            for launch in launches_of(operator, each):
                unique |= {(launch, target): None for target in each.targets if launch.runs_on(target)}
    return list(unique)


def problems(launch: Launch, compiled: Compiled) -> list[str]:
    """What is not as it must be: shared memory, sums across threads, offsets, and on the fast path spills."""
    found = []
    if compiled.shared > SHARED_MEMORY[compiled.target]:
        found.append(f"{compiled.shared} bytes of shared memory, more than {SHARED_MEMORY[compiled.target]}")
    if compiled.target == "sm_90" and (compiled.stack or 0) > _stack_allowed(launch) and _is_fast_path(launch):
        found.append(f"{compiled.stack} bytes of stack: registers are spilled")
    if compiled.fused_sums and compiled.target in ("sm_80", "sm_90"):  # later ones add pairs: registers are hidden
        found.append(f"{compiled.fused_sums} products are fused into sums across threads")
    if dict(launch.constants).get("AHEAD") and compiled.target == "sm_90" and not compiled.loads_first:
        found.append("the loads of the next step are issued behind the work of this one")
    if compiled.lost_truncations:
        found.append(f"{compiled.lost_truncations} offsets keep bits that a shift should have dropped")
    return found


def _stack_allowed(launch: Launch) -> int:
    """Bytes: J spills a few dozen registers with a bias, F1 four with a folded norm and a bias or a collapse, B two in
    a Sinkhorn iteration on logarithms. With eight streams F1 spills a few where it collapses, J outside of its
    loop. Where rows begin anywhere, both have room for a folded norm or a bias, for a norm or sums of the
    gradient of read weights, F1 for 32 rows of phi; J keeps one number until warps know what they do.
    """
    constants = dict(launch.constants)
    if launch.name in ROWS_BEGIN_ANYWHERE and constants["C"] % 8:
        plain = all(constants.get(name, 0) is None for name in ("norm_weight", "f_bias", "read_weights"))
        if launch.name == "streams_bwd_hopper":
            plain = constants.get("norm_weight", 0) is None and not constants["SUMS_READ"]
        most = 8 if launch.name == "streams_bwd_hopper" else 0
        return (most if plain else 96) if constants["P"] <= 24 else 160
    if launch.name in ("write_project_eight", "streams_bwd_eight"):
        return 24 if launch.name == "write_project_eight" else 320
    if launch.name == "write_project":
        more = constants.get("f_bias", 0) is not None or constants.get("read_weights", 0) is not None
        return 16 if more and constants.get("norm_weight", 0) is not None else 0
    if launch.name == "read_bwd":
        return 8 if constants["MATH"].log_space else 0
    return 256 if launch.name == "streams_bwd" and constants.get("f_bias", 0) is not None else 0


def _is_fast_path(launch: Launch) -> bool:
    """4 streams of bfloat16, or 8 in kernels of their own, and channels that are loaded 16 bytes at a time; or by warps
    that do nothing else.
    """
    constants, types = dict(launch.constants), dict(launch.signature)
    streams = constants["MATH"].streams if "MATH" in constants else constants.get("N", 4)
    activation = next((types[name] for name in ("x", "y", "g") if types.get(name, "constexpr") != "constexpr"), "*bf16")
    is_bfloat = activation == "*bf16" or activation.startswith("tensordesc<bf16")
    has_form = constants.get("C", 8) % 8 == 0 or launch.name in ROWS_BEGIN_ANYWHERE
    return streams == 4 and is_bfloat and has_form


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@functools.cache
def _console() -> Console:
    return Console(stderr=True)


@app.command()
def check(
    everything: Annotated[bool, typer.Option(help="Not the sample that CI takes, but all of it.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that compile.")] = os.cpu_count() or 1,
) -> None:
    """Compile many configurations; fail on spills, unstable sums, late loads, or where shared memory is too small."""
    launches = work(configurations(everything))
    failed = 0
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        done = pool.map(_try_compile, launches, chunksize=4)
        for (launch, target), result in track(
            zip(launches, done, strict=True), "compiling", len(launches), console=_console()
        ):
            wrong = [result] if isinstance(result, str) else problems(launch, result)
            for problem in wrong:
                failed += 1
                print(f"{target} {launch.name}: {problem}\n    {launch.variant}")
    print(f"{len(launches)} kernels compiled for {len({target for _, target in launches})} targets, {failed} problems")
    sys.exit(failed > 0)


def _try_compile(work_item: tuple[Launch, str]) -> Compiled | str:
    try:
        return compile_launch(*work_item)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


@app.command()
def sass(
    operator: str = "junction",
    recipe: str = "deepseek_v4",
    streams: int = 4,
    channels: int = 4096,
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, fp32, or streams/sublayer as in fp32/bf16")] = "bf16",
    target: Annotated[str, typer.Option(help=", ".join(TARGETS))] = "sm_90",
    optional: Annotated[bool, typer.Option(help="Give the optional arguments too: norms, biases.")] = True,
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """Registers, stack, shared memory and instruction counts of an operator's kernels."""
    table = Table("kernel", "registers", "stack", "shared", "seconds", "all", *INSTRUCTIONS, box=None)
    case = Configuration((operator,), Recipe.preset(recipe, streams=streams), channels, dtypes, optional)
    launches = launches_of(operator, case)
    for launch in track([launch for launch in launches if kernel in launch.name], "compiling", console=_console()):
        compiled = compile_launch(launch, target)
        counts = [str(compiled.instructions.get(name, "")) for name in ("all", *INSTRUCTIONS)]
        table.add_row(
            compiled.name, str(compiled.registers), str(compiled.stack), str(compiled.shared),
            f"{compiled.seconds:.1f}", *counts,
        )  # fmt: skip
    Console(width=200).print(table)


if __name__ == "__main__":
    app()
