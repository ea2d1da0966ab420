"""Draw the pictures of docs/concepts.md and docs/guides/single-pass.md as SVG: python tools/draw_concepts.py

Plain Python, so that the same script makes the same bytes everywhere; a test compares them with what is committed.
Each drawing brings a card of its own colours, for light and for dark, and is legible on any page.
"""

from __future__ import annotations

import html
import math
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "images" / "concepts"
STREAMS = 4

_STYLE = """
  .card { fill: #ffffff; stroke: #d0d4dc; }
  .box { fill: #eef1f8; stroke: #4a5675; }
  .op { fill: #fdf0dc; stroke: #b06f12; }
  .line { stroke: #4a5675; fill: none; }
  .stream { stroke: #3567c4; fill: none; }
  .read { stroke: #17805a; fill: none; }
  .write { stroke: #b3402f; fill: none; }
  .head-line { fill: #4a5675; } .head-stream { fill: #3567c4; } .head-read { fill: #17805a; } .head-write { fill: #b3402f; }
  text { fill: #1c2233; font-family: system-ui, sans-serif; font-size: 14px; }
  .title { font-weight: 600; font-size: 15px; }
  .small { font-size: 12px; }
  .code { font-family: ui-monospace, monospace; font-size: 12.5px; }
  .t-read { fill: #0f6a49; } .t-write { fill: #9b3425; } .t-stream { fill: #2552a6; }
  .cell { stroke: #d0d4dc; fill: #3567c4; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1f2430; stroke: #3a4254; }
    .box { fill: #2b3243; stroke: #9aa7c4; }
    .op { fill: #40331c; stroke: #dba24c; }
    .line { stroke: #9aa7c4; }
    .stream { stroke: #7ea6f4; }
    .read { stroke: #56c79b; }
    .write { stroke: #f08d7c; }
    .head-line { fill: #9aa7c4; } .head-stream { fill: #7ea6f4; } .head-read { fill: #56c79b; } .head-write { fill: #f08d7c; }
    text { fill: #e6eaf3; }
    .t-read { fill: #7bd9b3; } .t-write { fill: #f5a99c; } .t-stream { fill: #a4c1fa; }
    .cell { stroke: #3a4254; fill: #4f7fd9; }
  }
"""  # noqa: E501


class Drawing:
    """Elements of one SVG, in the order in which they are painted."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.width, self.height, self.description = width, height, description
        self.elements: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.elements.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        words = html.escape(words)
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def line(self, *points: tuple[float, float], kind: str = "line", width: float = 2, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.elements.append(f'<polyline class="{kind}" points="{path}" stroke-width="{width:g}"{dashes}/>')

    def arrow(self, *points: tuple[float, float], kind: str = "line", width: float = 2, dashed: bool = False) -> None:
        """A line with a head at its last point."""
        (x0, y0), (x1, y1) = points[-2:]
        angle, size = math.atan2(y1 - y0, x1 - x0), 5 + width
        back = (x1 - size * math.cos(angle), y1 - size * math.sin(angle))
        self.line(*points[:-1], back, kind=kind, width=width, dashed=dashed)
        side = (0.6 * size * math.sin(angle), -0.6 * size * math.cos(angle))
        corners = ((x1, y1), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1]))
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in corners)
        self.elements.append(f'<polygon class="head-{kind}" points="{path}"/>')

    def circle(self, x: float, y: float, radius: float, kind: str = "box") -> None:
        self.elements.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def cell(self, x: float, y: float, size: float, share: float) -> None:
        """A square as dark as its share of 1."""
        self.elements.append(
            f'<rect class="cell" x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill-opacity="{share:.3f}"/>'
        )

    def svg(self) -> str:
        description = html.escape(self.description)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{description}">'
        )
        card = f'<rect class="card" x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="10"/>'
        body = "\n".join([f"<title>{description}</title>", f"<style>{_STYLE}</style>", card, *self.elements])
        return f"{head}\n{body}\n</svg>\n"


def draw_streams() -> str:
    drawing = Drawing(820, 370, "The plain residual beside four streams with read, mix and write weights")
    _draw_plain_residual(drawing)
    drawing.line((312, 30), (312, 340), width=1, dashed=True)
    drawing.text(570, 36, "hyper-connection: N streams", "title")
    rows = [190 + 36 * index for index in range(STREAMS)]
    for index, y in enumerate(rows):
        drawing.arrow((346, y), (798, y), kind="stream", width=3)
        drawing.text(338, y + 5, f"{index}", "small t-stream")
    reads, writes = (3.4, 1.2, 2.2, 0.8), (1.0, 3.2, 1.4, 2.4)
    for y, read, write in zip(rows, reads, writes, strict=True):
        drawing.arrow((392, y), (470, 110), kind="read", width=read)
        drawing.arrow((650, 110), (752, y), kind="write", width=write)
    drawing.box(470, 80, 180, 58)
    drawing.text(560, 105, "sublayer F")
    drawing.text(560, 125, "attention, MLP, MoE", "small")
    drawing.box(528, 172, 64, 144, "op")
    drawing.text(560, 236, "H", "title")
    drawing.text(560, 256, "mixes", "small")
    drawing.text(398, 112, "pre reads", "small t-read")
    drawing.text(728, 112, "post writes", "small t-write")
    drawing.text(570, 350, "y[o] = sum_i H[o,i] x[i] + post[o] F(sum_i pre[i] x[i])", "code")
    return drawing.svg()


def _draw_plain_residual(drawing: Drawing) -> None:
    drawing.text(160, 36, "plain residual", "title")
    drawing.arrow((24, 244), (224, 244), kind="stream", width=3)
    drawing.arrow((246, 244), (298, 244), kind="stream", width=3)
    drawing.arrow((60, 244), (60, 110), (96, 110), kind="read")
    drawing.box(96, 80, 108, 58)
    drawing.text(150, 114, "sublayer F")
    drawing.arrow((204, 110), (235, 110), (235, 233), kind="write")
    drawing.circle(235, 244, 11)
    drawing.text(235, 249, "+", "title")
    drawing.text(160, 350, "y = x + F(x)", "code")


def draw_junction() -> str:
    drawing = Drawing(880, 400, "A chain of sublayers: enter, junctions and leave are the only users of the streams")
    drawing.text(440, 32, "what lies between two sublayers is one operator", "title")
    operators = ((36, "enter"), (246, "junction"), (456, "junction"), (666, "leave"))
    contents = {
        "enter": ("", "coefficients of x", "read: x_in = pre x"),
        "junction": ("write: y = H x + post f", "coefficients of y", "read: x_in = pre y"),
        "leave": ("write: y = H x + post f", "", ""),
    }
    for x, name in operators:
        drawing.box(x, 180, 164, 132, "op")
        drawing.text(x + 82, 204, name, "title")
        for row, words in enumerate(contents[name]):
            drawing.text(x + 82, 232 + 26 * row, words, "small")
    for index in range(3):
        x = operators[index][0] + 142
        drawing.box(x, 66, 110, 50)
        drawing.text(x + 55, 96, f"sublayer {index + 1}")
        drawing.arrow((x + 8, 180), (x + 8, 116), kind="read")
        drawing.text(x + 2, 152, "x_in", "small t-read", "end")
        drawing.arrow((x + 102, 116), (x + 102, 180), kind="write")
        drawing.text(x + 108, 152, "f", "small t-write", "start")
        drawing.arrow((x + 22, 216), (x + 68, 216), dashed=True, width=1.5)
        drawing.text(x + 45, 208, "mix", "small")
    for start, end in ((8, 36), (200, 246), (410, 456), (620, 666), (830, 872)):
        drawing.arrow((start, 286), (end, 286), kind="stream", width=4)
    drawing.text(
        440, 342, "The streams, the largest activation, go from operator to operator and nowhere else,", "small"
    )
    drawing.text(
        440, 362, "so autograd never adds gradients of them. mix = (pre, post, H) of the sublayer that reads.", "small"
    )
    return drawing.svg()


def draw_manifold() -> str:
    """The paper's iteration on one matrix of logits: columns, then rows."""
    logits = ((1.9, 1.4, -0.6, 0.3), (1.6, 1.2, -0.9, -1.0), (-0.8, 0.2, 1.6, 0.5), (1.2, -0.3, 1.3, 1.1))
    start = [[math.exp(value) for value in row] for row in logits]
    drawing = Drawing(820, 318, "Sinkhorn's iteration brings rows and columns of a matrix to sums of 1")
    panels = (("exp(logits)", start), ("1 iteration", normalised(start, 1)), ("20 iterations", normalised(start, 20)))
    for index, (title, matrix) in enumerate(panels):
        left = 36 + 264 * index
        drawing.text(left + 92, 34, title, "title")
        _draw_matrix(drawing, matrix, left, 50)
        if index:
            drawing.arrow((left - 42, 142), (left - 12, 142))
    drawing.text(410, 302, "numbers beside and below each matrix: sums of its rows and columns", "small")
    return drawing.svg()


def normalised(matrix: list[list[float]], iterations: int) -> list[list[float]]:
    """The matrix after so many iterations: columns divided by their sums, then rows by theirs."""
    for _ in range(iterations):
        sums = [sum(column) for column in zip(*matrix, strict=True)]
        matrix = [[value / total for value, total in zip(row, sums, strict=True)] for row in matrix]
        matrix = [[value / sum(row) for value in row] for row in matrix]
    return matrix


def _draw_matrix(drawing: Drawing, matrix: list[list[float]], left: float, top: float, size: float = 46) -> None:
    largest = max(max(row) for row in matrix)
    for o, row in enumerate(matrix):
        for i, value in enumerate(row):
            x, y = left + size * i, top + size * o
            drawing.cell(x, y, size, 0.08 + 0.55 * value / largest)
            drawing.text(x + size / 2, y + size / 2 + 5, f"{value:.2f}", "small")
        drawing.text(left + size * STREAMS + 6, top + size * (o + 0.5) + 4, f"{sum(row):.2f}", "small t-read", "start")
    for i, column in enumerate(zip(*matrix, strict=True)):
        drawing.text(left + size * (i + 0.5), top + size * STREAMS + 18, f"{sum(column):.2f}", "small t-write")


def draw_single_pass() -> str:
    drawing = Drawing(820, 332, "A usual read needs its own coefficients first; a shifted read takes those before")
    lanes = (
        (58, "usual: pre of sublayer l is computed from y, so y is read in a pass of its own", "read: pre(l) y"),
        (
            208,
            "shifted: pre of sublayer l-1 is already there, one pass writes y and reads x_in",
            "read: pre(l-1) y",
        ),
    )
    for top, title, read in lanes:
        drawing.text(28, top - 18, title, "title", "start")
        drawing.box(70, top, 200, 54, "op")
        drawing.text(170, top + 32, "write: y = H x + post f", "small")
        drawing.arrow((20, top + 27), (70, top + 27), kind="stream", width=4)
        drawing.box(330, top, 190, 54, "op")
        drawing.text(425, top + 32, "coefficients of y", "small")
        drawing.arrow((270, top + 27), (330, top + 27), kind="stream", width=4)
        drawing.box(580, top, 150, 54, "op")
        drawing.text(655, top + 32, read, "small")
        drawing.arrow((730, top + 27), (798, top + 27), kind="read")
        drawing.text(764, top + 18, "x_in", "small t-read")
        drawing.arrow((300, top + 27), (300, top + 78), (655, top + 78), (655, top + 54), kind="stream", width=4)
    drawing.arrow((520, 85), (580, 85))
    drawing.text(550, 77, "pre(l)", "small")
    drawing.arrow((520, 235), (548, 235), (548, 312), (798, 312), dashed=True)
    drawing.text(672, 304, "pre(l), for sublayer l+1", "small")
    return drawing.svg()


DRAWINGS = {
    "streams.svg": draw_streams,
    "junction.svg": draw_junction,
    "manifold.svg": draw_manifold,
    "single-pass.svg": draw_single_pass,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
