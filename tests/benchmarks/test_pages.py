"""What was measured is what the documentation says."""

from benchmarks import pages


def test_the_pages_are_of_what_was_kept():
    kept = pages.runs()
    assert pages.PAGE.read_text() == pages.history(kept)
    text = pages.RESULTS.read_text()
    assert text == pages.with_results(text, kept[0])


def test_a_noisy_row_is_marked():
    (run, *_) = pages.runs()
    row = run["rows"][0]
    quiet = pages.history([{**run, "rows": [{**row, "noise": 0.9}]}])
    noisy = pages.history([{**run, "rows": [{**row, "noise": 1.1}]}])
    assert (quiet.count(" ~ |"), noisy.count(" ~ |")) == (0, 1)
