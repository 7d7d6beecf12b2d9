"""A few shapes as SVG: what the diagrams are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK = "#222222"
QUERY, KEY, VALUE, SCORE = "#cfe3f5", "#cfe8d5", "#fbe3c0", "#eeeeee"
RESULT, GRADIENT, MEMORY = "#e3d7f1", "#f6cfcb", "#f7f7f7"

_HEAD = '<path d="M0 0 L7 3.5 L0 7 z" fill="{ink}"/>'


class Drawing:
    """Boxes, arrows and words on a white sheet, as wide and high as said, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
            f"{_HEAD.format(ink=INK)}</marker></defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *lines: str, dashed: bool = False,
        line: float = 1, size: int = 12,
    ) -> None:  # fmt: skip
        """A rectangle with centred lines of text."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{INK}"'
            f' stroke-width="{line:g}"{dashes}/>'
        )
        top = y + height / 2 - (len(lines) - 1) * 0.65 * size
        for number, words in enumerate(lines):
            self.text(x + width / 2, top + number * 1.3 * size + 0.35 * size, words, anchor="middle", size=size)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Through these points, with a head at the last."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="M{path}" fill="none" stroke="{INK}"{dashes} marker-end="url(#head)"/>')

    def grid(
        self, x: float, y: float, cell: float, rows: Sequence[Sequence[str]], labels: Sequence[Sequence[str]] = ()
    ) -> None:
        """Cells of these colours, side by side, with a word in each where there are words."""
        for row, colours in enumerate(rows):
            for column, colour in enumerate(colours):
                words = (labels[row][column],) if labels and labels[row][column] else ()
                self.box(x + column * cell, y + row * cell, cell, cell, colour, *words, line=0.6, size=11)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])
