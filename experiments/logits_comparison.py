"""How far the logits of two runs on the same tokens are apart, and how far they may be.

The yardstick is XLA's own rounding: XLA in the compared dtype against XLA in float32, with the same
parameters and the same tokens. Two runs that round differently scatter independently around the
float32 ones, so two sound ones may differ by more than one of them is off, but by the triangle
inequality not by more than twice as much, where each is as close to float32 as XLA. On a CPU, XLA
against itself with the softmax weights rounded to bfloat16, as the kernels round them, differs by
1.2 times XLA's own rounding in stories260k and by 1.0 times in random-4l-128. In the latter one
lost key in each full page makes it 22 times, a scale of the scores that is 3% off 4 times.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

BOUND = 2.0
"""Times the yardstick: each of two runs may be as far from float32 as XLA is."""
BOUND_RULE = (
    "largest and root-mean-square difference at most 2 times those of xla in this dtype to xla in"
    " float32 (same parameters, same tokens): each may be as far from float32 as xla"
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of logits from others: over all entries, and over all steps.

    Attributes:
      max: largest absolute difference.
      rms: root of the mean square of the differences.
      same_argmax: fraction of steps with the same most likely token.
    """

    max: float
    rms: float
    same_argmax: float

    def is_within(self, yardstick: "Difference") -> bool:
        """Whether `max` and `rms` are both at most `BOUND` times the yardstick's; never for NaN."""
        return self.max <= BOUND * yardstick.max and self.rms <= BOUND * yardstick.rms


def difference(
    logits: Float32[np.ndarray, "steps vocab"], others: Float32[np.ndarray, "steps vocab"]
) -> Difference:
    """The difference of two runs' logits.

    Raises ValueError if there is no step, or the shapes differ.
    """
    if logits.shape != others.shape or not logits.size:
        raise ValueError(
            "`logits` and `others` must have one shape [steps, vocab] with at least one step; got"
            f" {logits.shape} and {others.shape}."
        )
    gap = logits.astype(np.float64) - others
    same = logits.argmax(axis=1) == others.argmax(axis=1)
    return Difference(
        float(np.abs(gap).max()), float(np.sqrt(np.mean(gap * gap))), float(same.mean())
    )


def decode_steps_of(rows: Sequence[np.ndarray]) -> Float32[np.ndarray, "steps vocab"]:
    """The decode steps of all rows of `forced_logits`, without each row's first, the prefill's."""
    return np.concatenate([row[1:] for row in rows])
