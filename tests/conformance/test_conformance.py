import collections
import sys

import pytest

from conformance import report, systems
from conformance.__main__ import main
from conformance.program import BATCH, REPLICAS, Program, all_programs, select
from conformance.server import compare, is_equal
from conformance.systems import reference, strategy


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize(
    "name", ["batch_norm", "dropout", "custom_train_step_with_sample_weight"]
)
def test_keras_strategy_equals_reference(name):
    program = next(p for p in all_programs() if p.name == name)
    one = reference.run(program, 1)
    cell = compare(one, strategy.run(program, 2, one.initial))
    assert is_equal(cell), cell
    assert not cell["warnings"]


def test_programs_have_unique_names():
    names = collections.Counter(p.name for p in all_programs())
    assert len(names) >= 60
    assert set(names.values()) == {1}


def test_programs_have_an_uneven_last_batch():
    for program in all_programs():
        data = program.data(program.rows)
        assert {len(part) for part in _arrays(data.x)} == {program.rows}
        last = program.rows % program.batch_size or program.batch_size
        assert all(last % n for n in REPLICAS) or program.batch_size != BATCH


def _arrays(x):
    return list(x.values()) if isinstance(x, dict) else [x]


def test_is_equal_needs_weights_and_logs_within_tolerances():
    assert is_equal({"weights": 1e-6, "logs": 1e-6})
    assert not is_equal({"weights": 1e-6, "logs": 1e-3})
    assert not is_equal({"error": "ValueError: no"})


def test_scores_count_cells():
    a, b, c = (program.name for program in all_programs()[:3])
    place = {"system": "ddp", "rows": "uneven", "replicas": 2}
    equal = {"equal": True, "weights": 0.0, "logs": 0.0, "warnings": []}
    lines = [
        {**place, "program": a, **equal},
        {**place, "program": b, "equal": False, "error": "no"},
        {**place, "program": b, **equal, "rows": "full"},
        {**place, "program": c, "equal": False, "skipped": "a reason"},
    ]
    table = report.scores({"ddp": {"lines": lines}})
    assert "| DDP by hand, torch | 1 of 2 | 2 of 2 | 0 | 1 | 1 |" in table


EQUAL = {"equal": True, "weights": 1e-8, "logs": 0.0, "warnings": []}
OTHER = {"equal": False, "weights": 0.5, "logs": 0.0, "warnings": []}


@pytest.mark.parametrize(
    ("cell", "full", "word"),
    [
        (EQUAL, None, "equal"),
        (OTHER, EQUAL, "full"),
        (OTHER, OTHER, "differs"),
        ({**OTHER, "warnings": ["a cause"]}, OTHER, "warns"),
        ({"equal": False, "error": "no"}, OTHER, "raises"),
        ({"equal": False, "error": "no"}, EQUAL, "full"),
        ({"equal": False, "skipped": "a reason"}, None, "–"),
    ],
)
def test_outcome_is_one_word(cell, full, word):
    assert report.outcome(cell, full) == word


def test_figures_have_a_line_for_each_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures.tsv")
    place = {"system": "ddp", "rows": "uneven", "program": all_programs()[0].name}
    cells = [{**place, "replicas": 2, **OTHER}, {**place, "replicas": 3, **EQUAL}]
    report.write_figures({"ddp": {"lines": cells}})
    head, *lines = report.FIGURES.read_text().splitlines()
    assert head.split("\t")[4:7] == ["outcome", "weights", "logs"]
    assert [line.split("\t")[2:6] for line in lines] == [
        ["2", "uneven", "differs", "5e-01"],
        ["3", "uneven", "equal", "1e-08"],
    ]


@pytest.mark.parametrize("option", ["--system", "--only"])
def test_unknown_names_are_an_error(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conformance", option, "nonesuch"])
    with pytest.raises(SystemExit, match="2"):
        main()
    error = capsys.readouterr().err
    assert f"`{option}`" in error
    assert "'nonesuch'" in error


def test_select_finds_families_and_parts_of_names():
    assert {p.family for p in select(["losses"])} >= {"losses"}
    assert all("dropout" in p.name for p in select(["dropout"]))
    assert isinstance(select([])[0], Program)
    (system,) = systems.select(["data_parallel-jax"])
    assert system.environment == ""
    assert len(systems.select(["keras_strategy"])) == 3
