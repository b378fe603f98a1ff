"""docs/errors.md and its neighbour list the errors and warnings of the code."""

import keras
import pytest

from tools import pages

if keras.backend.backend() != "torch":
    pytest.skip("the same on every backend: runs on torch", allow_module_level=True)


@pytest.mark.parametrize("name", ["errors", "plain_errors"])
def test_page_is_current(name):
    assert pages.PAGES[name].read_text() == pages.WRITERS[name](), "run `make pages`"


def test_read_messages_finds_errors_and_warnings():
    source = """
raise ValueError(f"Argument `x` must be 1. Received: x={x}")
logger.warning("worker %s is slow", name)
raise error
"""
    assert list(pages.read_messages(source)) == [
        ("ValueError", "Argument `x` must be 1. Received: x=…"),
        ("log", "worker … is slow"),
    ]


def test_split_message_leaves_out_what_was_received():
    text = "It is wrong. Received: …. A cause. Use `y`, which is right."
    message = pages.Message("core", "ValueError", text)
    assert message.split() == ("It is wrong.", "A cause. Use `y`, which is right.")
