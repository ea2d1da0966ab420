"""The emulated GPU on programs of a few lines: it computes what hardware does, and sees what hardware lets pass."""

from __future__ import annotations

import pytest
import torch
from emulator.decode import Decoded
from emulator.hazards import Hazard
from emulator.launch import Parameter, Ready, run
from emulator.memory import SHARED_BASE, BadAccess
from emulator.program import Hangs
from emulator.ptx import parse
from torch import Tensor

from mhckit.kernels._descriptors import Tiles

WORD = torch.int32
# Which of two accesses comes first is drawn by lot.
UNORDERED = "nothing orders the two|may still have to read"
# Where each thread has its number, its word of the first tensor, and one in shared memory.
PLACES = """
    mov.u32 %r1, %tid.x;
    ld.param.b64 %rd1, [p0];
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    shl.b32 %r2, %r1, 2;
    add.s32 %r3, %r2, global_smem;
"""
OUT = "st.global.b32 [%rd2], {r};"


def _run(
    body: str, *tensors: Tensor, warps: int = 2, tiles: Tiles | None = None, grid: int = 1, seed: int = 0
) -> None:  # fmt: skip
    """tiles: how the last tensor is described."""
    plain = tensors[:-1] if tiles else tensors
    names = [f"\t.param .u64 p{k}" for k in range(len(plain))]
    names += [f"\t.param .align 64 .b8 d{k}[128]" for k in range(5 if tiles else 0)]
    head = ".visible .entry test(\n" + ",\n".join(names) + f"\n)\n.reqntid {32 * warps}"
    kernel = parse(f"{head}\n{{\n{body}\n\tret;\n}}\n")
    parameters = [Parameter(tensor) for tensor in plain] + ([Parameter(tensors[-1], tiles=tiles)] if tiles else [])
    run(Ready(Decoded(kernel), 8192), (grid,), parameters, seed)


def _computed(body: str, a: int = 0, b: int = 0) -> int:
    """What becomes of a and b, as bits, in %r12."""
    words = torch.zeros(32, dtype=WORD)
    _run(f"{PLACES} mov.b32 %r10, {a}; mov.b32 %r11, {b}; {body} st.global.b32 [%rd2], %r12;", words, warps=1)
    assert (words == words[0]).all()
    return int(words[0]) & 0xFFFFFFFF


@pytest.mark.parametrize(("body", "a", "b", "result"), [
    ("add.s32 %r12, %r10, %r11;", 0xFFFFFFFF, 2, 1),
    ("rem.s32 %r12, %r10, %r11;", 0xFFFFFFF9, 4, 0xFFFFFFFD),
    ("mul.hi.s32 %r12, %r10, %r11;", 0xFFFFFFFE, 0x40000000, 0xFFFFFFFF),
    ("mul.hi.u32 %r12, %r10, %r11;", 0xFFFFFFFE, 0x40000000, 0x3FFFFFFF),
    ("shl.b32 %r12, %r10, %r11;", 1, 40, 0),
    ("shr.s32 %r12, %r10, %r11;", 0x80000000, 40, 0xFFFFFFFF),
    ("shr.u32 %r12, %r10, %r11;", 0x80000000, 31, 1),
    ("bfe.s32 %r12, %r10, 4, 4;", 0x80, 0, 0xFFFFFFF8),
    ("bfe.u32 %r12, %r10, 4, 4;", 0x8F, 0, 8),
    ("bfe.s32 %r12, %r10, 28, 8;", 0x80000000, 0, 0xFFFFFFF8),
    ("setp.ne.f32 %p1, %r10, %r11; selp.b32 %r12, 5, 6, %p1;", 0x7FC00000, 0, 6),
    ("cvt.rna.tf32.f32 %r12, %r10;", 0x3F801000, 0, 0x3F802000),
    ("cvt.rna.tf32.f32 %r12, %r10;", 0xFFFFFFFF, 0, 0x7FFFFFFF),
    ("cvt.rmi.ftz.f32.f32 %r12, %r10;", 0xBFC00000, 0, 0xC0000000),  # of -1.5 it makes -2
    ("cvt.rzi.s32.f32 %r12, %r10;", 0x4F800000, 0, 0x7FFFFFFF),
    ("shf.l.wrap.b32 %r12, %r10, %r11, 40;", 0xAB000000, 0xCD, 0x0000CDAB),
    ("prmt.b32 %r12, %r10, %r11, 0x7610;", 0x33221100, 0x77665544, 0x77661100),
    ("prmt.b32 %r12, %r10, 0, 0x444B;", 0x80000000, 0, 0x000000FF),  # a sign, spread
    ("setp.lt.s32 %p1, %r10, %r11; selp.b32 %r12, 5, 6, %p1;", 0xFFFFFFFF, 0, 5),
    ("setp.lt.u32 %p1, %r10, %r11; selp.b32 %r12, 5, 6, %p1;", 0xFFFFFFFF, 0, 6),
    ("mov.b32 %r12, 7; setp.eq.s32 %p1, %r10, %r11; @%p1 mov.b32 %r12, 8;", 1, 2, 7),
    ("mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r12, {%rs2, %rs1};", 0x00010002, 0, 0x00020001),
    ("cvt.rn.bf16x2.f32 %r12, %r10, %r11;", 0x3F808000, 0x3F818000, 0x3F803F82),  # ties go to even
    ("cvt.rn.bf16x2.f32 %r12, %r10, %r11;", 0x7FC00000, 0xFF800000, 0x7FFFFF80),
    ("fma.rn.f32 %r12, %r10, %r10, %r11;", 0x3F800001, 0xBF800002, 0x28800000),  # one rounding: 2^-46
    ("min.xorsign.abs.f32 %r12, %r10, %r11;", 0xC0000000, 0x3F800000, 0xBF800000),
    ("max.f32 %r12, %r10, %r11;", 0x7FC00000, 0x3F800000, 0x3F800000),
    ("mul.wide.s32 %rd5, %r10, %r11; shr.u64 %rd6, %rd5, 32; cvt.u32.u64 %r12, %rd6;", 0xFFFFFFFF, 1, 0xFFFFFFFF),
])  # fmt: skip
def test_arithmetic(body: str, a: int, b: int, result: int) -> None:
    assert _computed(body, a, b) == result


@pytest.mark.parametrize(("way", "wanted"), [
    ("bfly.b32 %r5, %r1, 3, 31, -1", [lane ^ 3 for lane in range(32)]),
    ("idx.b32 %r5, %r1, 7, 31, -1", [7] * 32),
    ("idx.b32 %r5, %r1, 1, 4127, -1", [lane // 16 * 16 + 1 for lane in range(32)]),  # of each half
])  # fmt: skip
def test_shuffles(way: str, wanted: list[int]) -> None:
    words = torch.zeros(32, dtype=WORD)
    _run(f"{PLACES} shfl.sync.{way}; {OUT.format(r='%r5')}", words, warps=1)
    assert words.tolist() == wanted


SWAP = f"""{PLACES} st.shared.b32 [%r3], %r1; {{barrier}}
    xor.b32 %r4, %r3, 128; ld.shared.b32 %r5, [%r4]; {OUT.format(r="%r5")}"""


def test_lanes_may_store_different_nan_to_one_place() -> None:
    """What hardware makes of a NaN has no sign and no payload."""
    results = torch.zeros(64)
    body = "and.b32 %r5, %r1, 1; shl.b32 %r5, %r5, 31; or.b32 %r5, %r5, 0x7fc00000; st.global.b32 [%rd1], %r5;"
    _run(f"{PLACES} {body}", results, warps=1)
    assert results[0].isnan()


def test_a_program_has_so_much_shared_memory() -> None:
    kernel = Decoded(parse(".visible .entry test(\n)\n.reqntid 32\n{\n\tret;\n}\n"))
    run(Ready(kernel, 232448), (1,), [])
    with pytest.raises(BadAccess, match="232449 bytes"):
        run(Ready(kernel, 232449), (1,), [])


@pytest.mark.parametrize("seed", range(3))
def test_a_barrier_orders_what_warps_exchange(seed: int) -> None:
    words = torch.zeros(64, dtype=WORD)
    _run(SWAP.format(barrier="bar.sync 0;"), words, seed=seed)
    assert words.tolist() == [*range(32, 64), *range(32)]
    with pytest.raises(Hazard, match=UNORDERED):
        _run(SWAP.format(barrier=""), words, seed=seed)


def test_a_store_waits_for_those_who_read() -> None:
    late = SWAP.format(barrier="bar.sync 0;") + "{barrier} st.shared.b32 [%r3], %r2;"
    words = torch.zeros(64, dtype=WORD)
    _run(late.replace("{barrier}", "bar.sync 0;"), words)
    with pytest.raises(Hazard, match=UNORDERED):
        _run(late.replace("{barrier}", ""), words)


def test_what_nobody_stored_is_no_number() -> None:
    words = torch.zeros(32)
    _run(f"{PLACES} ld.shared.b32 %r5, [%r3+256]; {OUT.format(r='%r5')}", words, warps=1)
    assert words.isnan().all()


@pytest.mark.parametrize(("body", "warps", "message"), [
    ("st.global.b32 [%rd2+32768], %r1;", 2, "outside"),
    ("st.global.b32 [%rd2+4], %r1;", 2, "outside of a tensor"),
    ("ld.global.b32 %r5, [%rd2+20];", 2, "does not exist"),
    ("st.global.b32 [%rd2+2], %r1;", 1, "not aligned"),
    ("st.global.b32 [%rd1], %r1;", 1, "different values"),
    ("mov.b32 %r5, 7; st.global.b32 [%rd1], %r5;", 2, "another warp"),
    ("ld.global.b32 %r5, [%rd1]; st.global.b32 [%rd2], %r5;", 2, "another warp"),
    ("st.global.b32 [%rd2], %r1; bar.sync 0; ld.global.b32 %r5, [%rd1];", 2, "another warp of this launch stored"),
    ("ld.shared.b32 %r5, [%r3+8192];", 1, "outside of shared memory"),
])  # fmt: skip
def test_accesses_that_are_wrong(body: str, warps: int, message: str) -> None:
    """The tensor has a word for each thread."""
    with pytest.raises(BadAccess, match=message):
        _run(PLACES + body, torch.zeros(64, dtype=WORD), warps=warps)


def test_lanes_do_not_part_ways() -> None:
    with pytest.raises(NotImplementedError, match="part ways"):
        _run(f"{PLACES} setp.lt.u32 %p1, %r1, 5; @%p1 bra $L_end; {OUT.format(r='%r1')} $L_end:", torch.zeros(64))


BARRIER = SHARED_BASE + 4096
FIRST = f"setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [{BARRIER}], {{count}};"
WAIT = f"""
    {{{{ .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared.b64 complete, [{BARRIER}], 0;
    @!complete bra.uni waitLoop;
    }}}}
"""


@pytest.mark.parametrize(("count", "error", "message"), [
    (32, None, ""),  # the first warp's threads arrive
    (64, Hangs, "nobody can go on"),
    (16, BadAccess, "more have arrived"),
])  # fmt: skip
def test_barriers_in_memory(count: int, error: type[Exception] | None, message: str) -> None:
    """The second warp waits for what the first has stored."""
    body = (
        PLACES
        + FIRST.format(count=count)
        + f"""
    bar.sync 0;
    setp.ge.u32 %p2, %r1, 32;
    @%p2 bra $L_wait;
    st.shared.b32 [%r3], %r1;
    mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];
    ret;
$L_wait:
    {WAIT.format()}
    ld.shared.b32 %r5, [%r3+-128]; st.global.b32 [%rd2], %r5;"""
    )
    words = torch.zeros(64, dtype=WORD)
    if error is None:
        _run(body, words)
        assert words[32:].tolist() == list(range(32))
    else:
        with pytest.raises(error, match=message):
            _run(body, words)


def test_a_phase_says_nothing_of_the_next_one() -> None:
    """Both warps have arrived; the first stores, and arrives again."""
    body = f"""{PLACES} {FIRST.format(count=64)} bar.sync 0; mbarrier.arrive.shared::cta.b64 _, [{BARRIER}]; bar.sync 0;
    setp.ge.u32 %p2, %r1, 32; @%p2 bra $L_wait;
    st.shared.b32 [%r3], %r1; mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];
    ret;
$L_wait: {WAIT.format()} ld.shared.b32 %r5, [%r3+-128];"""
    for seed in range(3):
        with pytest.raises(Hazard, match=UNORDERED):
            _run(body, torch.zeros(64, dtype=WORD), seed=seed)


@pytest.mark.parametrize(("remaining", "arrived"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_copies_are_waited_for_in_groups(remaining: int, arrived: int) -> None:
    """Of two, each with a copy of a word for every lane."""
    body = f"""{PLACES} cp.async.ca.shared.global [%r3], [%rd2], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r3+128], [%rd2], 4; cp.async.commit_group; cp.async.wait_group {remaining};"""
    for number, offset in enumerate((0, 128)):
        read = f"{body} ld.shared.b32 %r5, [%r3+{offset}];"
        if number < arrived:
            _run(read, torch.zeros(32, dtype=WORD), warps=1)
        else:
            with pytest.raises(Hazard, match="asynchronous copy"):
                _run(read, torch.zeros(32, dtype=WORD), warps=1)


def test_programs_do_not_read_what_others_store() -> None:
    """Whichever of them runs first."""
    body = (
        PLACES
        + """mov.u32 %r4, %ctaid.x; setp.eq.u32 %p1, %r4, {reader};
    @%p1 ld.global.b32 %r5, [%rd2]; @!%p1 st.global.b32 [%rd2], %r1;"""
    )
    for reader in range(2):
        with pytest.raises(BadAccess, match="another warp of this launch"):
            _run(body.format(reader=reader), torch.zeros(32, dtype=WORD), warps=1, grid=2)


@pytest.mark.parametrize("body", [
    "@%p1 shfl.sync.bfly.b32 %r5, %r1, 3, 31, -1;",
    "neg.bf16 %rs1, %rs2;",
    "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
    "mad.hi.s32 %r5, %r1, %r2, %r3;",
    "cvt.rz.f32.f64 %r5, %rd1;",
    "fma.rn.f64 %rd3, %rd1, %rd1, %rd1;",
    "bar.arrive 0, 64;",
    "fence.proxy.async.global;",
    "ld.shared.s8 %r5, [%r3];",
    "popc.b32 %r5, %r1;",
])  # fmt: skip
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(NotImplementedError):
        _run(PLACES + body, torch.zeros(32, dtype=WORD), warps=1)


def test_no_tensor_lies_where_a_barrier_does() -> None:
    with pytest.raises(Hazard, match="where a barrier lies"):
        _run(f"{PLACES}{FIRST.format(count=1)} st.shared.b32 [%r3+4096], %r1;", torch.zeros(64), warps=1)


@pytest.mark.parametrize(("leaves", "hangs"), [(88, False), (120, True)])
def test_registers_are_those_that_others_leave(leaves: int, hangs: bool) -> None:
    """16 warps have 64K for all threads; eight ask for 168 each."""
    body = f"""{PLACES} setp.ge.u32 %p1, %r1, 256; @%p1 bra $L_less;
    setmaxnreg.inc.sync.aligned.u32 168; ret;
$L_less:
    setmaxnreg.dec.sync.aligned.u32 {leaves};"""
    if hangs:
        with pytest.raises(Hangs):
            _run(body, torch.zeros(512), warps=16)
    else:
        _run(body, torch.zeros(512), warps=16)


LOAD_TILE = f"""{PLACES} {FIRST.format(count=1)} {{fence}} bar.sync 0;
    mov.b64 %rd3, d0; mov.b32 %r8, 64; mov.b32 %r9, 3;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], 1024;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [{SHARED_BASE}], [%rd3, {{{{%r8, %r9}}}}], [{BARRIER}];
    {{wait}}
    ld.shared.b32 %r5, [%r3]; {OUT.format(r="%r5")}"""


def test_tiles_that_are_loaded() -> None:
    """Rows of 128 bytes, 16 bytes at a time in other places from row to row; 0 where there is no matrix."""
    matrix, words = torch.randn(9, 96).bfloat16(), torch.zeros(8 * 32, dtype=WORD)
    tiles, fence = Tiles((9, 96), (8, 64)), "fence.proxy.async.shared::cta;"
    _run(LOAD_TILE.format(fence=fence, wait=WAIT.format()), words, matrix, warps=8, tiles=tiles)
    padded = torch.zeros(8, 64, dtype=torch.bfloat16)
    padded[:6, :32] = matrix[3:, 64:]
    rows = words.view(torch.bfloat16).view(8, 8, 8)
    for r in range(8):
        for vector in range(8):
            assert torch.equal(rows[r, vector ^ r], padded[r, 8 * vector : 8 * vector + 8])
    with pytest.raises(Hazard, match=UNORDERED):
        _run(LOAD_TILE.format(fence=fence, wait=""), words, matrix, warps=8, tiles=tiles)
    with pytest.raises(Hazard, match="without a fence"):
        _run(LOAD_TILE.format(fence="", wait=WAIT.format()), words, matrix, warps=8, tiles=tiles)


STORE_TILE = f"""{PLACES} cvt.u16.u32 %rs1, %r1; mov.b32 %r6, {{{{%rs1, %rs1}}}}; st.shared.b32 [%r3], %r6; {{fence}}
    bar.sync 0; mov.b64 %rd3, d0; mov.b32 %r8, 64; mov.b32 %r9, 3; setp.eq.u32 %p1, %r1, 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{{{%r8, %r9}}}}], [{SHARED_BASE}];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"""


def test_tiles_that_are_stored() -> None:
    matrix, words = torch.zeros(9, 96, dtype=torch.bfloat16), torch.zeros(8 * 32, dtype=WORD)
    tiles = Tiles((9, 96), (8, 64))
    _run(STORE_TILE.format(fence="fence.proxy.async.shared::cta;"), words, matrix, warps=8, tiles=tiles)
    stored = matrix.view(torch.int16)
    assert (stored[:3] == 0).all() and (stored[:, :64] == 0).all()
    assert stored[4, 64:72].tolist() == [36, 36, 37, 37, 38, 38, 39, 39], "of the second row, its second 16 bytes"
    with pytest.raises(Hazard, match="without a fence"):
        _run(STORE_TILE.format(fence=""), words, matrix, warps=8, tiles=tiles)


def test_tiles_with_shorter_rows() -> None:
    """Of 64 bytes: the places of 16 bytes change with every second row."""
    matrix, words = torch.randn(9, 96).bfloat16(), torch.zeros(8 * 32, dtype=WORD)
    tiles, fence = Tiles((9, 96), (16, 32)), "fence.proxy.async.shared::cta;"
    _run(LOAD_TILE.format(fence=fence, wait=WAIT.format()), words, matrix, warps=8, tiles=tiles)
    rows = words.view(torch.bfloat16).view(16, 4, 8)
    for r in range(6):
        for vector in range(4):
            assert torch.equal(rows[r, vector ^ r // 2 % 4], matrix[3 + r, 64 + 8 * vector : 72 + 8 * vector])
    assert (rows[6:] == 0).all()
    for tile, message in (((8, 8), "rows have"), ((512, 64), "256 rows at most")):
        with pytest.raises(BadAccess, match=message):
            _run(LOAD_TILE.format(fence=fence, wait=""), words, matrix, warps=8, tiles=Tiles((9, 96), tile))


def test_a_matrix_is_turned() -> None:
    """Of each lane's two neighbours of a row become two neighbours of a column."""
    matrix = torch.randn(8, 8).bfloat16()
    words = matrix.clone().view(WORD).flatten()
    turn = "movmatrix.sync.aligned.m8n8.trans.b16 %r6, %r5;"
    _run(f"{PLACES} ld.global.b32 %r5, [%rd2]; {turn} {OUT.format(r='%r6')}", words, warps=1)
    assert torch.equal(words.view(torch.bfloat16).view(8, 8), matrix.T)


def test_products_of_a_warp() -> None:
    """Of a left operand two matrices, one below the other; the right one's columns as rows."""
    left, right = torch.randn(2, 8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    before, total = torch.randn(2, 8, 8), torch.zeros(2, 8, 8)
    body = f"""{PLACES} ld.global.b32 %r10, [%rd2]; ld.global.b32 %r11, [%rd2+128]; ld.global.b32 %r12, [%rd2+256];
    shl.b32 %r7, %r1, 3; cvt.u64.u32 %rd8, %r7;
    ld.param.b64 %rd7, [p1]; add.s64 %rd9, %rd7, %rd8;
    ld.global.v2.b32 {{%r20, %r21}}, [%rd9]; ld.global.v2.b32 {{%r22, %r23}}, [%rd9+256];
    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {{%r30, %r31, %r32, %r33}}, {{%r10, %r11}}, {{%r12}}, \
        {{%r20, %r21, %r22, %r23}};
    ld.param.b64 %rd7, [p2]; add.s64 %rd9, %rd7, %rd8;
    st.global.v2.b32 [%rd9], {{%r30, %r31}}; st.global.v2.b32 [%rd9+256], {{%r32, %r33}};"""
    operands = torch.cat((left, right[None])).view(WORD).flatten()
    _run(body, operands, before, total, warps=1)
    torch.testing.assert_close(total, left.float() @ right.float().T + before, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError):
        _run(body.replace(".f32.bf16.bf16", ".f32.f16.f16"), operands, before, total, warps=1)


# Operands in rows of 32 bytes at the beginning of shared memory and 2048 behind it, described as hardware wants them.
_DESCRIPTOR = 3 << 62 | (256 >> 4) << 32 | (256 >> 4) << 16
PRODUCT = f"""{PLACES} ld.global.b32 %r5, [%rd2]; ld.global.b32 %r6, [%rd2+512];
    st.shared.b32 [%r3], %r5; st.shared.b32 [%r3+2048], %r6;
    ld.global.b32 %r5, [%rd2+1024]; st.shared.b32 [%r3+512], %r5;
    ld.global.b32 %r5, [%rd2+1536]; st.shared.b32 [%r3+1024], %r5;
    ld.global.b32 %r5, [%rd2+2048]; st.shared.b32 [%r3+1536], %r5;
    fence.proxy.async.shared::cta; bar.sync 0;
    mov.b64 %rd4, {_DESCRIPTOR | SHARED_BASE >> 4}; mov.b64 %rd5, {_DESCRIPTOR | (SHARED_BASE + 2048) >> 4};
    {{fence}}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{{%r20,%r21,%r22,%r23}}}}, %rd4, %rd5, 0, 1, 1, 0, 0;
    {{commit}} {{wait}}
    st.shared.b32 [%r3+2048], %r1; {{late}}
    ld.param.b64 %rd7, [p1]; shl.b32 %r7, %r1, 4; cvt.u64.u32 %rd8, %r7; add.s64 %rd9, %rd7, %rd8;
    st.global.v4.b32 [%rd9], {{{{%r20, %r21, %r22, %r23}}}};"""
END = "wgmma.wait_group.sync.aligned 0;"


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"


def _product(wait: str, late: str, fence: str = FENCE, commit: str = COMMIT) -> tuple[Tensor, Tensor]:
    """[64, 16] @ [8, 16]^T as tensor cores leave it in registers, and as it is. The four warps' last stores overwrite
    the right operand.
    """
    left, right = torch.randn(64, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    rows = [part.reshape(-1, 2, 8).clone() for part in (left, right)]
    for part in rows:  # 16 bytes swap with their neighbours in every second 128 bytes
        swapped = torch.arange(len(part)) // 4 % 2 == 1
        part[swapped] = part[swapped].flip(1)
    first, second = (part.reshape(-1) for part in rows)
    given = torch.cat([first[:256], second, torch.zeros(128).bfloat16(), first[256:]]).view(WORD).contiguous()
    results = torch.zeros(128, 4)
    _run(PRODUCT.format(fence=fence, commit=commit, wait=wait, late=late), given, results, warps=4)
    got = results.view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 8)
    return got, left.float() @ right.float().T


def test_products_of_tensor_cores() -> None:
    got, want = _product(f"{END} bar.sync 0;", "")
    torch.testing.assert_close(got, want)


def test_what_is_overwritten_before_tensor_cores_are_done_is_no_number() -> None:
    got, _ = _product("bar.sync 0;", END)
    assert got.isnan().any()


def test_sums_that_are_not_waited_for_are_no_numbers() -> None:
    with pytest.raises(BadAccess, match="tensor cores work"):
        _product("bar.sync 0;", "")
    with pytest.raises(BadAccess, match="tensor cores work"):
        _product(f"{END} bar.sync 0;", "", commit="")
    with pytest.raises(BadAccess, match="was overwritten"):
        _product(f"mov.b32 %r20, 0; {END} bar.sync 0;", "")


@pytest.mark.parametrize("late", ["", "mov.b32 %r32, 0;"])
def test_registers_are_kept_while_tensor_cores_read_them(late: str) -> None:
    """The left operand's, which another product reads, too."""
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}, {%r30,%r31,%r32,%r33}, "
    body = f"""{PLACES} st.shared.b32 [%r3], %r1; fence.proxy.async.shared::cta; bar.sync 0;
        mov.b64 %rd5, {_DESCRIPTOR | SHARED_BASE >> 4};
        mov.b32 %r30, 1; mov.b32 %r31, 1; mov.b32 %r32, 1; mov.b32 %r33, 1; {FENCE}
        {product} %rd5, 0, 1, 1, 0; {product} %rd5, 1, 1, 1, 0; {COMMIT} {late} {END}"""
    if not late:
        _run(body, torch.zeros(128, 1), warps=4)
        return
    with pytest.raises(BadAccess, match="while tensor cores read it"):
        _run(body, torch.zeros(128, 1), warps=4)


def test_products_want_a_fence_behind_what_writes_registers() -> None:
    with pytest.raises(BadAccess, match="no fence"):
        _product(f"{END} bar.sync 0;", "", fence="")
