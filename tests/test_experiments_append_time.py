"""The command line that times the writing of keys and values, as far as it goes without a GPU."""

from experiments import append_time
from experiments.json_lines import read_json_lines


def test_smoke_writes_a_row_for_each_batch(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert append_time.main(["append_time", "--smoke", "--commit=abc", f"--output={path}"]) == 0
    rows = read_json_lines(path)
    assert [row["batch_size"] for row in rows] == list(append_time.BATCHES)
    assert {(row["implementation"], row["commit"]) for row in rows} == {("xla", "abc")}


def test_timing_is_refused_without_a_gpu(capsys):
    assert append_time.main(["append_time"]) == 2
    assert "timing needs a GPU; `--smoke` runs anywhere." in capsys.readouterr().err
