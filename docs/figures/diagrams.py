"""The diagrams of docs/kernels.md: `python -m docs.figures.diagrams` writes them into docs/images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.figures.drawing import GRADIENT, KEY, MEMORY, QUERY, RESULT, SCORE, VALUE, Drawing

IMAGES = Path(__file__).parents[1] / "images"
WHITE = "#ffffff"


CELL, X, Y, TILES = 36, 150, 70, 6  # of a grid of query tiles and key tiles


def causal_grid(d: Drawing, colours: dict[tuple[int, int], str], labels: dict[tuple[int, int], str]) -> None:
    """Cells by (query, key): those that a causal mask hides are white, the others grey unless a colour is said."""
    shown = [
        [WHITE if key > query else colours.get((query, key), SCORE) for key in range(TILES)] for query in range(TILES)
    ]
    words = [[labels.get((query, key), "") for key in range(TILES)] for query in range(TILES)]
    d.grid(X, Y, CELL, shown, words)


def tiles_beside(d: Drawing, *, query: int | None = None, key: int | None = None) -> None:
    """The tiles along both sides of the grid, a block's own with a bold line."""
    d.text(X + 108, Y - 42, "key tiles, and their values", anchor="middle")
    for tile in range(TILES):
        d.box(X + tile * CELL, Y - 30, CELL, 11, KEY, line=2 if tile == key else 0.6)
        d.box(X + tile * CELL, Y - 16, CELL, 11, VALUE, line=2 if tile == key else 0.6)
        d.box(X - 22, Y + tile * CELL, 16, CELL, QUERY, line=2 if tile == query else 0.6)


def forward() -> Drawing:
    """A query tile a block; key tiles from the last to the first."""
    d = Drawing(720, 316, "The forward: one query tile a block, key tiles from the last to the first")
    mine = 4
    own = [(mine, key) for key in range(mine, -1, -1)]
    tiles_beside(d, query=mine)
    causal_grid(d, dict.fromkeys(own, RESULT), {place: str(step) for step, place in enumerate(own, 1)})
    d.text(X - 30, Y + 20, "query tiles", anchor="end")
    d.text(X - 30, Y + mine * CELL + 22, "a block's own", anchor="end", bold=True)
    d.text(X + 108, Y + TILES * CELL + 18, "white: hidden by the causal mask, never computed", anchor="middle", size=11)

    left, top = 420, 62
    d.box(left, top, 270, 158, MEMORY)
    d.text(left + 12, top + 20, "for each key tile, in this order", bold=True)
    steps = (
        "s = q kᵀ",
        "x = score(s), −∞ where hidden",
        "m' = max(m, rows of x)",
        "p = exp(x − m')",
        "l = l · exp(m − m') + Σ p",
        "out = out · exp(m − m') + p v",
    )
    for number, words in enumerate(steps):
        d.text(left + 12, top + 44 + 19 * number, words)
    d.arrow((X + TILES * CELL + 4, Y + mine * CELL + 18), (left - 4, Y + mine * CELL + 18))
    d.arrow((left + 135, top + 160), (left + 135, top + 182))
    d.box(left + 20, top + 184, 230, 30, RESULT, "out / l,   lse = m + log l")
    return d


def backward() -> Drawing:
    """A key tile a block; every query tile that sees it."""
    d = Drawing(720, 330, "The backward: one key tile a block, every query tile that sees it")
    mine = 2
    own = [(query, mine) for query in range(mine, TILES)]
    tiles_beside(d, key=mine)
    causal_grid(d, dict.fromkeys(own, GRADIENT), {place: str(step) for step, place in enumerate(own, 1)})
    d.text(X - 30, Y + 20, "q, dout,", anchor="end")
    d.text(X - 30, Y + 36, "lse, D", anchor="end")
    d.arrow((X + mine * CELL + 18, Y + TILES * CELL + 2), (X + mine * CELL + 18, Y + TILES * CELL + 18))
    d.box(X + mine * CELL - 27, Y + TILES * CELL + 20, 90, 22, GRADIENT, "dk, dv")

    left, top = 420, 42
    d.box(left, top, 270, 178, MEMORY)
    d.text(left + 12, top + 20, "for each query tile that sees the keys", bold=True)
    steps = (
        "s = q kᵀ,   p = exp(x − lse)",
        "dp = dout vᵀ",
        "ds = p (dp − D) dx/ds",
        "dv = dv + pᵀ dout",
        "dk = dk + dsᵀ q",
        "dq = dq + ds k    to memory",
    )
    for number, words in enumerate(steps):
        d.text(left + 12, top + 46 + 22 * number, words)
    d.arrow((X + (mine + 1) * CELL + 4, Y + 4 * CELL + 18), (left - 4, Y + 4 * CELL + 18))
    d.arrow((left + 135, top + 180), (left + 135, top + 200))
    d.box(left + 20, top + 202, 230, 40, GRADIENT, "sums of dq, float32,", "added to by all blocks")
    return d


def hopper_forward() -> Drawing:
    """Who does what when in fwd_sm90."""
    d = Drawing(720, 330, "Hopper's forward: loaders ahead, two consumers that take turns at the tensor cores")
    left, unit, height = 128, 92, 24

    def task(lane: float, begin: float, end: float, colour: str, words: str) -> None:
        d.box(left + begin * unit, lane, (end - begin) * unit - 3, height, colour, words, size=11)

    names = {
        "k's loader": 40,
        "v's loader": 70,
        "exponentials": 126,
        "products": 158,
        "products ": 206,
        "exponentials ": 238,
    }
    for name, lane in names.items():
        d.text(10, lane + 16, name)
    for number, begin in enumerate((0, 0.5, 1.6, 3.4)):
        task(names["k's loader"], begin, begin + 0.5, KEY, f"k({number})")
    for number, begin in enumerate((0.5, 1, 4)):
        task(names["v's loader"], begin, begin + 0.5, VALUE, f"v({number})")
    for consumer, (products, exponentials) in enumerate((("products", "exponentials"), ("products ", "exponentials "))):
        first = 0.5 + 0.45 * consumer
        task(names[products], first, first + 0.45, SCORE, "s(0)")
        task(names[exponentials], first + 0.45, first + 1.35, RESULT, "p(0)")
        for number in (1, 2):
            begin = 1.9 + 2 * (number - 1) + consumer
            task(names[products], begin, begin + 0.45, SCORE, f"s({number})")
            task(names[products], begin + 0.45, begin + 1, QUERY, f"p·v({number - 1})")
            if begin + 1.35 < 6.4:
                task(names[exponentials], begin + 0.45, begin + 1.35, RESULT, f"p({number})")
    upper, lower = names["products"] + height + 2, names["products "] - 2
    for at in (0.95, 2.9, 4.9):
        d.arrow((left + at * unit - 2, upper), (left + at * unit - 2, lower), dashed=True)
    d.arrow((left + 3.9 * unit - 2, lower), (left + 3.9 * unit - 2, upper), dashed=True)
    d.text(10, 118, "consumer 0: 64 queries", bold=True)
    d.text(10, 282, "consumer 1: 64 queries", bold=True)
    d.text(left, 24, "time →", bold=True)
    d.text(
        left + 52, 302, "Dashed: the turn, which a consumer gives the other once its products are asked for.", size=11
    )
    d.text(left + 52, 318, "So exponentials of the one run beside products of the other. Not to scale.", size=11)
    return d


def hopper_backward() -> Drawing:
    """Who does what in bwd_sm90."""
    d = Drawing(720, 330, "Hopper's backward: the warps of one block and what passes between them")
    d.box(10, 60, 110, 50, KEY, "loader,", "one thread")
    d.box(10, 180, 110, 50, SCORE, "statistician,", "one warp")
    d.box(160, 50, 120, 70, QUERY, "q, dout:", "a ring of stages", "in shared memory", size=11)
    d.box(160, 180, 120, 50, SCORE, "lse and D", "of each stage", size=11)
    for number, y in ((0, 46), (1, 156)):
        d.box(
            330,
            y,
            150,
            88,
            GRADIENT,
            f"consumer {number}: 64 keys",
            "p = exp(x − lse)",
            "ds = p (dp − D) dx/ds",
            "dv, dk in registers",
            size=11,
        )
    d.box(530, 84, 70, 70, MEMORY, "ds in", "shared", "memory", size=11)
    d.box(630, 84, 80, 70, GRADIENT, "dq's", "warpgroup:", "dq = ds k", size=11)
    d.box(630, 190, 80, 40, MEMORY, "dq's tile", size=11)
    d.box(630, 262, 80, 50, GRADIENT, "adders, a", "thread each", size=11)
    d.box(330, 268, 200, 38, RESULT, "sums of dq in memory, float32")
    d.box(160, 268, 120, 38, RESULT, "scale dk, dv")
    d.arrow((120, 85), (156, 85))
    d.arrow((120, 205), (156, 205))
    d.arrow((280, 85), (326, 85))
    d.arrow((280, 95), (305, 95), (305, 190), (326, 190))
    d.arrow((280, 205), (315, 205), (315, 110), (326, 110))
    d.arrow((280, 215), (326, 215))
    d.arrow((480, 90), (526, 108))
    d.arrow((480, 200), (510, 200), (510, 130), (526, 130))
    d.arrow((600, 119), (626, 119))
    d.arrow((670, 154), (670, 186))
    d.arrow((670, 230), (670, 258))
    d.arrow((630, 287), (534, 287))
    d.arrow((405, 244), (405, 256), (300, 256), (300, 287), (284, 287), dashed=True)
    d.text(
        10, 24, "One block: one key tile of one KV head. k and v stay in shared memory for the whole of it.", bold=True
    )
    d.text(10, 322, "Dashed: once, at the end.", size=11)
    return d


def splits() -> Drawing:
    """Few queries, many keys."""
    d = Drawing(720, 230, "Split keys: parts attended side by side, then combined")
    parts, x, width = 4, 120, 120
    d.text(10, 56, "keys, values")
    d.text(10, 114, "blocks")
    d.text(10, 160, "workspace")
    for part in range(parts):
        left = x + part * (width + 6)
        d.box(left, 38, width, 14, KEY, line=0.6)
        d.box(left, 54, width, 14, VALUE, line=0.6)
        d.arrow((left + width / 2, 70), (left + width / 2, 88))
        d.box(left, 90, width, 36, QUERY, "q, all heads", "of a KV head", size=11)
        d.arrow((left + width / 2, 128), (left + width / 2, 142))
        d.box(left + 10, 144, width - 20, 24, RESULT, f"out{'₀₁₂₃'[part]}, lse{'₀₁₂₃'[part]}")
        d.arrow((left + width / 2, 170), (x + 180 + 48 * part, 190))
    d.box(x + 112, 192, 280, 28, RESULT, "fwd_combine:  Σ exp(lseₛ − lse) outₛ,  lse")
    d.text(10, 24, "Keys of one row, in four splits", bold=True)
    return d


def pages() -> Drawing:
    """A block table and a pool."""
    d = Drawing(720, 250, "Pages: a block table says where each sequence's keys lie in the pool")
    d.text(10, 24, "block_table, page_size 4", bold=True)
    table = (("5", "0", "3"), ("2", "6", "−"))
    used = (10, 6)
    for row, entries in enumerate(table):
        y = 44 + row * 60
        d.text(10, y + 20, f"sequence {row}")
        for column, entry in enumerate(entries):
            d.box(90 + column * 40, y, 40, 30, SCORE, entry, dashed=entry == "−")
        d.text(222, y + 20, f"seqused_k {used[row]}")
    x, y, cell = 360, 44, 40
    d.text(x, 24, "pool of pages: k and v", bold=True)
    owner = {5: (0, 0), 0: (0, 1), 3: (0, 2), 2: (1, 0), 6: (1, 1)}
    for page in range(8):
        left, top = x + page % 4 * 86, y + page // 4 * 96
        d.text(left, top + 70, f"page {page}", size=11)
        for slot in range(4):
            colour = WHITE
            words = ""
            if page in owner:
                sequence, number = owner[page]
                key = number * 4 + slot
                if key < used[sequence]:
                    colour, words = (KEY, VALUE)[sequence], str(key)
            d.box(
                left + slot % 2 * cell,
                top + slot // 2 * 26,
                cell,
                26,
                colour,
                *((words,) if words else ()),
                line=0.6,
                size=11,
            )
    d.text(10, 196, "Numbers: the sequence's own keys.", size=11)
    d.text(10, 212, "White: never read. Key j of a row is slot", size=11)
    d.text(10, 228, "j mod 4 of the page block_table[row, j // 4].", size=11)
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "forward": forward,
    "backward": backward,
    "hopper-forward": hopper_forward,
    "hopper-backward": hopper_backward,
    "splits": splits,
    "pages": pages,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
