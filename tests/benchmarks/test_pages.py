"""Measured figures on the pages of the documentation."""

import json

from benchmarks import pages


def test_pages_match_recorded_figures():
    kept = pages.runs()
    assert pages.PAGE.read_text() == pages.history(kept)
    text = pages.RESULTS.read_text()
    assert text == pages.with_results(text, kept[0])


def test_noisy_row_is_marked():
    (run, *_) = pages.runs()
    row = run["rows"][0]
    quiet = pages.history([{**run, "rows": [{**row, "noise": 0.9}]}])
    noisy = pages.history([{**run, "rows": [{**row, "noise": 1.1}]}])
    assert (quiet.count(" ~ |"), noisy.count(" ~ |")) == (0, 1)


def test_remeasured_rows_replace_old_ones(tmp_path, monkeypatch):
    def run(**ratios):
        rows = [
            {"backend": case[:-1], "case": case, "peer": "a peer", "ratio": ratio}
            for case, ratio in ratios.items()
        ]
        path = tmp_path / "run.json"
        path.write_text(json.dumps({"version": "1", "date": "today", "rows": rows}))
        return path

    monkeypatch.setattr(pages, "HISTORY", tmp_path / "history")
    pages.HISTORY.mkdir()
    pages.keep(run(jax1=0.9, torch1=0.8))
    pages.keep(run(jax2=1.0, torch1=1.1))

    (kept,) = pages.runs()
    ratios = {row["case"]: row["ratio"] for row in kept["rows"]}
    assert list(ratios.items()) == [("jax1", 0.9), ("jax2", 1.0), ("torch1", 1.1)]


def test_older_runs_keep_what_the_page_shows(tmp_path, monkeypatch):
    kept = pages.runs()
    shown = pages.history(kept)
    monkeypatch.setattr(pages, "HISTORY", tmp_path / "history")
    pages.HISTORY.mkdir()
    file = tmp_path / "run.json"
    oldest = {**kept[0], "date": "2026-01-01", "rows": []}
    for run in (oldest, *reversed(kept)):
        file.write_text(json.dumps(run))
        pages.keep(file)
    assert pages.history(pages.runs()) == shown
    assert pages.runs()[0] == kept[0]
    assert [run["date"] for run in pages.runs()] == [run["date"] for run in kept]


def test_scaling_page_has_the_rows_of_its_picture():
    rows = json.loads((pages.ROOT / "benchmarks/network/links.json").read_text())
    table = (pages.ROOT / "docs" / "scaling.md").read_text()
    for row in rows:
        alone = next(r for r in rows if r["link"] == row["link"])
        cells = [
            f"{row[key]:.3f} ({alone[key] / row[key]:.0%})".replace("%", " %")
            for key in ("ours", "DDP", "predicted")
        ]
        assert f"| {' | '.join(cells)} |" in table
