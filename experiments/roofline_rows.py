"""The rows of `experiments.kernel_roofline`, checked for who draws or quotes them."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

NUMBERS = ("time_us", "p10_us", "p90_us", "floor_us", "floor_share")
NAMES = ("case", "policy", "implementation", "dtype", "device", "jax", "commit", "date")


def distinct(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """The values of a field, each once, in the rows' order."""
    return list(dict.fromkeys(row[name] for row in rows))


def check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError unless every row has the fields, and its case and policy to itself."""
    if not rows:
        raise ValueError("`rows` must hold at least one measured case; got none.")
    for number, row in enumerate(rows, start=1):
        _check_row(row, f"row {number}")
    keys = [(row["case"], row["policy"]) for row in rows]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise ValueError(f"`rows` must name a case and policy once; got {twice[0]} twice.")


def rows_hash(rows: Sequence[dict[str, Any]]) -> str:
    """SHA-256 of the rows, whatever the order of their fields."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _check_row(row: dict[str, Any], place: str) -> None:
    missing = [name for name in (*NAMES, *NUMBERS) if name not in row]
    if missing:
        raise ValueError(f"{place} must have `{missing[0]}`; it has {', '.join(row)}.")
    for name in NAMES:
        if not isinstance(row[name], str):
            raise ValueError(f"{place}: `{name}` must be a text; got {row[name]!r}.")
    for name in NUMBERS:
        value = row[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(
                f"{place}: `{name}` must be a positive number; got {value!r}. A smoke test's rows"
                " have no times."
            )
    if not row["p10_us"] <= row["time_us"] <= row["p90_us"]:
        raise ValueError(
            f"{place}: `time_us` must be between `p10_us` and `p90_us`; got {row['time_us']},"
            f" {row['p10_us']} and {row['p90_us']}."
        )
