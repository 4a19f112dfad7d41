"""The comparison of implementations: rows, bounds, a planted error, command line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_cases import compilations

from codec_jax import attention
from experiments import compare_implementations
from experiments.ahead_of_time import AheadOfTime
from experiments.compare_config import ComparisonConfig
from experiments.compare_report import describe_difference, describe_row, describe_speed
from experiments.logits_comparison import Difference, decode_steps_of, difference
from experiments.visit_timing import Visit

SMALL = ComparisonConfig(
    models=("stories260k",),
    implementations=("xla", "reference"),
    num_samples=2,
    max_new_tokens=20,
    page_size=32,
)
BATCH_SIZE = 8


@pytest.fixture(scope="module")
def row():
    (row,) = compare_implementations.run(SMALL)
    return row


def test_a_row_says_what_was_compared(row):
    assert (row["model"], row["dtype"], row["page_size"]) == ("stories260k", "bfloat16", 32)
    assert row["implementations"] == ["xla", "reference"]
    assert row["implementations_in_hlo"] == ["xla", "xla"]
    assert (row["generated_by"], row["generated_by_in_hlo"]) == ("xla", "xla")
    assert (row["head_dim"], row["stored_head_dim"]) == (8, [8, 8])
    assert {"device", "jax", "commit", "tree_hash", "date"} <= set(row)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_every_decode_step_is_compared(row):
    assert row["batch_size"] == BATCH_SIZE
    assert 1 <= row["num_steps"] <= SMALL.max_new_tokens - 1
    assert row["num_compared"] == row["num_new_tokens"] - BATCH_SIZE > 100
    assert row["total_kv_tokens"] > 5 * row["unique_kv_tokens"] > 5 * 2 * SMALL.page_size


def test_two_sound_implementations_are_within_bfloat16s_own_rounding(row):
    assert row["is_within_bound"] and row["same_argmax"] > 0.97
    assert 0 < row["max_difference"] <= row["max_bound"] == 2 * row["xla_max_error_to_float32"]
    assert 0 < row["rms_difference"] <= row["rms_bound"] == 2 * row["xla_rms_error_to_float32"]
    assert row["max_error_to_float32"][0] == row["xla_max_error_to_float32"]
    assert row["max_bound"] < row["logits_std"] / 5, "a bound as wide as the logits holds anything"


def test_the_generation_reports_its_speed(row):
    assert row["tokens_per_s"] * row["decode_step_us"] > 0
    assert row["compile_s"] > 0 and row["num_compilations"] > 0


@pytest.mark.slow
def test_one_lost_key_breaks_the_bound(monkeypatch):
    whole = attention.attend_rows_densely

    def lossy(rows, pool, steps, layer, **statics):
        is_decoding = rows.position is None
        newest = steps.col_hi - (steps.col_hi > steps.col_lo + 1).astype(jnp.int32)
        steps = dataclasses.replace(steps, col_hi=newest) if is_decoding else steps
        return whole(rows, pool, steps, layer, **statics)

    monkeypatch.setattr(attention, "attend_rows_densely", lossy)
    jax.clear_caches()
    try:
        (row,) = compare_implementations.run(dataclasses.replace(SMALL, max_new_tokens=8))
    finally:
        jax.clear_caches()  # no other test may meet the lossy program
    assert not row["is_within_bound"]
    assert row["max_difference"] > 4 * row["max_bound"]
    assert row["max_error_to_float32"][1] > 4 * row["max_error_to_float32"][0]
    assert "BEYOND" in describe_row(row)


def test_difference_is_that_of_numpy():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 7)).astype(np.float32)
    others = logits.copy()
    others[2, 3] += 100
    others[4] -= 0.25
    found = difference(logits, others)
    gap = np.abs(logits.astype(np.float64) - others)
    assert found.max == gap.max() and found.max == pytest.approx(100)
    assert found.rms == pytest.approx(np.sqrt((gap**2).sum() / 35))
    assert found.same_argmax == (1 if logits[2].argmax() == 3 else 4 / 5)


@pytest.mark.parametrize("shapes", [((0, 4), (0, 4)), ((2, 4), (2, 5))])
def test_difference_refuses_nothing_to_compare(shapes):
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError, match=r"`logits` and `others` must have one shape"):
        difference(*arrays)


YARDSTICK = Difference(max=1.0, rms=0.1, same_argmax=1.0)
VERDICTS = {
    "at both bounds": (Difference(2.0, 0.2, 1.0), True),
    "a larger maximum": (Difference(2.1, 0.1, 1.0), False),
    "a larger mean": (Difference(1.0, 0.21, 1.0), False),
    "no number": (Difference(float("nan"), float("nan"), 0.0), False),
    "infinite": (Difference(float("inf"), float("inf"), 0.0), False),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_both_bounds_must_hold(case):
    found, expected = VERDICTS[case]
    fields = describe_difference(found, YARDSTICK)
    assert fields["is_within_bound"] == found.is_within(YARDSTICK) == expected
    assert (fields["max_difference"] is None) == (not np.isfinite(found.max))
    json.dumps(fields, allow_nan=False)


def test_first_tokens_are_prefills_and_left_out():
    rows = [np.full((length, 3), length, np.float32) for length in (1, 3, 2)]
    rows[1][0] = -1
    assert decode_steps_of(rows)[:, 0].tolist() == [3, 3, 2]


def visit(seconds: float, num_tokens: int, num_steps: int, num_compilations: int = 0) -> Visit:
    return Visit(seconds, num_tokens, num_steps, num_compilations, 1.5 * num_compilations)


def test_speed_leaves_out_what_compiled():
    visits = [visit(4, 8, 1, 1), visit(9, 128, 16, 2), visit(0.5, 120, 16), visit(0.5, 80, 4)]
    assert describe_speed(visits) == {
        "tokens_per_s": 200,
        "decode_step_us": 50_000,
        "speed_includes_compilation": False,
        "prefill_s": 2.5,
        "compile_s": 4.5,
        "num_compilations": 3,
    }
    assert describe_speed(visits[:2])["speed_includes_compilation"]
    assert describe_speed(visits[:1])["tokens_per_s"] is None


def test_ahead_of_time_compiles_once_and_refuses_other_shapes():
    function = AheadOfTime(jax.jit(lambda x, *, times: x * times, static_argnames="times"))
    assert function.implementation is None
    with compilations() as events:
        results = [function(np.float32([1, value]), times=3.0) for value in (2, 5)]
    assert len(events) == 1 and function.implementation == "xla"
    assert [result.tolist() for result in results] == [[3, 6], [3, 15]]
    with pytest.raises(TypeError):
        function(np.float32([1, 2, 3]), times=3.0)


def test_ahead_of_time_finds_a_kernel():
    def kernel(x):
        with jax.named_scope("mosaic_gpu"):  # stands for the custom call's target
            return x + 1

    function = AheadOfTime(jax.jit(kernel))
    assert function(np.float32(1)) == 2
    assert function.implementation == "mosaic_gpu"


def main(*arguments: str) -> int:
    return compare_implementations.main(["compare_implementations", *arguments])


def test_smoke_writes_the_rows(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert main("--smoke", f"--output={output}", "--commit=abc") == 0
    (row,) = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert (row["model"], row["commit"], row["dtype"]) == ("stories260k", "abc", "bfloat16")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("stories260k xla / reference (bfloat16), max ")


def test_a_difference_beyond_the_bound_is_a_failure(monkeypatch):
    rows = [{"is_within_bound": True}, {"is_within_bound": False}]
    monkeypatch.setattr(compare_implementations, "prepare", lambda _: rows)
    monkeypatch.setattr(compare_implementations, "compare", lambda row: [row])
    monkeypatch.setattr(compare_implementations, "describe_row", str)
    assert main() == 1
    rows.pop()
    assert main() == 0


REFUSED = {
    "an unknown flag": ("--model=big", "model"),
    "an unknown model": ("--models=stories260k,big", "`models` must be among"),
    "no model": ("--models=", "`models` must be 1 or more different names; got ()"),
    "an unknown implementation": ("--implementations=xla,cuda", "got 'cuda'"),
    "one implementation": ("--implementations=xla", "2 or more different names; got ('xla',)"),
    "the same twice": ("--implementations=xla,xla", "2 or more different names"),
    "no rounding": ("--dtype=float32", "`dtype` must be among bfloat16, float16; got 'float32'"),
    "no decode step": ("--max_new_tokens=1", "`max_new_tokens` must be at least 2"),
    "no sample": ("--num_samples=0", "`num_samples` must be at least 1; got 0"),
    "an unknown policy": ("--policy=best", "'best'"),
    "a long completion": ("--max_new_tokens=512", "context of 512"),
    "a page that no kernel takes": ("--page_size=24", "'mosaic_gpu' cannot do this"),
    "an output in no folder": ("--output=missing/out.jsonl", "missing/out.jsonl"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line_before_any_work(case, capsys, monkeypatch, tmp_path):
    argument, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_implementations, "compare", lambda _: pytest.fail("worked"))
    others = [] if "implementation" in argument or "page" in argument else ["xla,reference"]
    assert main(*(f"--implementations={names}" for names in others), argument) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and reason in captured.err
