"""What a single cell of a table is."""

import math
from typing import Any


def is_nothing(value: Any) -> bool:
    """None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_missing(value: Any) -> bool:
    """None, NaN, or a string of nothing but white space."""
    return is_nothing(value) or (isinstance(value, str) and not value.strip())


def number(value: Any) -> float | None:
    """A finite number, also where it is written as a string; else None."""
    if isinstance(value, bool | list | dict | None) or (isinstance(value, str) and "_" in value):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def label_name(value: Any) -> str:
    """A label as people wrote it: a string unchanged, a float 1.0 as `1`, JSON's true as `true`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def is_broken(text: str) -> bool:
    """Whether the text holds half a surrogate pair, which no file and no tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
