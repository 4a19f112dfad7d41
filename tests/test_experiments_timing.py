"""The timer without a GPU: it refuses to guess, and reads a record of kernels right."""

import pytest

from experiments.timing import _Kernel, _split_calls, _summarise, time_each


def record(*spans):
    """Kernels as (module, start, end) in nanoseconds."""
    return [_Kernel(f"{module}_kernel", module, start, end) for module, start, end in spans]


def test_without_a_gpu_there_is_no_time():
    with pytest.raises(RuntimeError, match="timing needs a GPU; the default backend is cpu"):
        time_each([lambda: None])


def test_a_call_is_what_lies_between_readings_of_the_buffer():
    mark = "jit_empty_l2"
    kernels = record(
        ("jit_before", 0, 5),
        (mark, 10, 20),
        (mark, 20, 30),
        ("jit_call", 30, 35),
        ("jit_call", 34, 44),
        (mark, 50, 60),
        ("jit_call", 60, 66),
        (mark, 70, 80),
    )
    first, second, last = _split_calls(kernels[1:])
    assert [kernel.start_ns for kernel in first] == [30, 34]
    assert [kernel.start_ns for kernel in second] == [60]
    assert last == []
    # What ran before the first reading belongs to no call.
    assert _split_calls(kernels) == [first, second, last]


def test_a_span_is_from_the_first_start_to_the_last_end():
    calls = [
        record(("jit_call", 0, length / 2), ("jit_call", length / 4, length))
        for length in (4000, 1000, 3000, 2000, 5000)
    ]
    timing = _summarise(calls)
    assert timing.median_us == 3.0
    assert (timing.p10_us, timing.p90_us) == pytest.approx((1.4, 4.6))
    assert timing.kernels == (("jit_call_kernel", 1.5), ("jit_call_kernel", 2.25))
