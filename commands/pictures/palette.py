"""The colours of every picture and page, in light and in dark.

Okabe and Ito's palette is told apart with every kind of colour vision, and in grey by its order. A
colour never stands alone: a sign, a shape, a dash or a word says the same.
"""

from __future__ import annotations

BLUE, VERMILION, ORANGE, PURPLE, SKY, GREEN = (
    "#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#009E73"
)  # fmt: skip
GROUND, INK, FAINT, LINE = "#FFFFFF", "#222222", "#6A6A6A", "#DDDDDD"
# The same on a dark screen. Text keeps a contrast of 4.5 to the ground, lines of data one of 3.
DARK = {GROUND: "#181818", INK: "#DDDDDD", FAINT: "#A0A0A0", LINE: "#3A3A3A", BLUE: "#2F93D6"}
# On a coloured field these two stay as they are, light screen or dark.
LIGHT_ON_FIELD, DARK_ON_FIELD = "#FEFEFE", "#212121"
