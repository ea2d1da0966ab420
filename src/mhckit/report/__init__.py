"""A page that stands alone: one HTML file with its figures in it, light and dark, that loads nothing.

It knows nothing of mHC and needs nothing but Python. Everything that is put into a page is text, and shown as text.
"""

from .charts import Band, Drawing, Guide, Series, Tip, band_chart, bar_chart, line_chart
from .matrices import Matrices, Stack
from .page import Page, Section
from .parts import Choice, Columns, Details, Figure, Finding, Findings, Group, Paragraph, Part, Table
from .text import number, visible

__all__ = [
    "Band",
    "Choice",
    "Columns",
    "Details",
    "Drawing",
    "Figure",
    "Finding",
    "Findings",
    "Group",
    "Guide",
    "Matrices",
    "Page",
    "Paragraph",
    "Part",
    "Section",
    "Series",
    "Stack",
    "Table",
    "Tip",
    "band_chart",
    "bar_chart",
    "line_chart",
    "number",
    "visible",
]
