"""Arrays that wait on the disk until they are written."""

import ml_dtypes
import numpy as np
import pytest

from keras_strategy.training import resume
from keras_strategy.training.resume import ArraySpill


def test_large_arrays_spill_to_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "MIN_SPILL_BYTES", 8)
    given = [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.ones(4, ml_dtypes.bfloat16),
        np.zeros((0, 3)),
        np.array(3),
    ]
    left = tmp_path / ".model.keras.spill"
    left.mkdir()
    (left / "of a process that was killed").touch()
    with ArraySpill(tmp_path / "model.keras") as kept:
        found = [kept.add(array) for array in given]
        kept.check()
        assert [type(array) is np.memmap for array in found] == [
            True,
            True,
            False,
            False,
        ]
        assert sorted(file.name for file in left.iterdir()) == ["0", "1"]
        for a, b in zip(given, found, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        found[0][:] = 0  # of its own
    assert not list(tmp_path.iterdir())


def test_full_disk_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "MIN_SPILL_BYTES", 8)
    (tmp_path / "file").touch()
    with ArraySpill(tmp_path / "file" / "folder") as kept:
        for _ in range(2):
            assert kept.add(np.ones(9)).size == 0
        with pytest.raises(NotADirectoryError):
            kept.check()
