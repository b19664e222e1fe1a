"""Numbers as the pages and their charts write them."""

import math
from collections.abc import Collection

import numpy as np


def in_words(value: float, digits: int = 3) -> str:
    """Write a number briefly, as a person would: a few digits, powers of ten where it is tiny or huge."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        number, _, power = f"{value:.{digits - 1}e}".partition("e")
        text = f"{number.rstrip('0').rstrip('.')}e{int(power)}"
    else:
        text = f"{value:.{digits}g}" if size < 999.5 else f"{value:.0f}"
    return text.replace("-", "−")


def fixed(value: float, decimals: int = 2) -> str:
    """Write a number with that many decimals, so that those of a column stand under each other."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−") if math.isfinite(value) else "–"


def signed(value: float, decimals: int = 2) -> str:
    """Write a difference with its sign and that many decimals."""
    return f"+{fixed(value, decimals)}" if round(value, decimals) > 0 else fixed(value, decimals)


def decimals_for(values: Collection[float]) -> int:
    """Return the decimals that show two digits of the spread of some values: 2 to 6."""
    finite = np.asarray([value for value in values if math.isfinite(value)])
    spread = float(finite.std()) if len(finite) else 0.0
    return min(max(2, 1 - math.floor(math.log10(spread))), 6) if spread > 0 else 2
