"""The notebooks run, and their two forms hold the same cells."""

from pathlib import Path

import jupytext
import nbclient
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))


def cells(path):
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_both_forms_of_a_notebook_hold_the_same_cells(source):
    # `jupytext --sync notebooks/*.py` mends a difference.
    assert cells(source) == cells(source.with_suffix(".ipynb"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(source):
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": "."}})
    client.execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(output.output_type == "display_data" for output in printed)
    assert not any(output.output_type == "error" for output in printed)


def test_there_is_a_notebook():
    assert SOURCES
