"""Pictures of digits to train on, drawn with numpy: nothing is downloaded, and the same seed draws the same pictures.

`python digits.py` shows some.
"""

import numpy as np

# Seven rows of the ten digits, each five dots wide.
_FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures [count, 1, 28, 28] (float32, 0 to 1) and the digits that they show [count] (int32).

    Each digit is moved, three or four times as wide as in the font, more or less bright, and noise lies over it.
    """
    random = np.random.default_rng(seed)
    shown = random.integers(0, 10, count, dtype=np.int32)
    pictures = random.normal(0, 0.15, (count, 1, 28, 28)).astype(np.float32)
    glyphs = _glyphs()
    for picture, digit in zip(pictures, shown):
        glyph = np.kron(glyphs[digit], np.ones((3, random.integers(3, 5)), np.float32))
        height, width = glyph.shape
        top, left = (28 - height) // 2 + random.integers(-2, 3), (28 - width) // 2 + random.integers(-2, 3)
        picture[0, top : top + height, left : left + width] += glyph * random.uniform(0.6, 1)
    return pictures.clip(0, 1), shown


def batches(count: int, size: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `count` batches of `size` pictures each."""
    pictures, shown = digits(count * size, seed)
    return [(pictures[start : start + size], shown[start : start + size]) for start in range(0, count * size, size)]


def _glyphs() -> np.ndarray:
    """Return the font as an array [digit, row, column] of 0 and 1."""
    rows = [[[dot == "#" for dot in part] for part in line.split()] for line in _FONT.split("\n") if line]
    return np.array(rows, np.float32).transpose(1, 0, 2)


if __name__ == "__main__":
    for picture, digit in zip(*digits(5, seed=0)):
        print(digit)
        for row in picture[0]:
            print("".join(" .:-=+*#%@"[int(brightness * 9.99)] for brightness in row))
