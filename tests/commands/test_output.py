import collections
import io
import os

from keras_strategy.commands.launcher import PrefixedStream, failure_lines


def pass_on(*chunks: bytes) -> tuple[bytes, collections.deque[bytes]]:
    """Return the output of a worker that writes these pieces."""
    source, writer = os.pipe()
    target = io.BytesIO()
    last_lines: collections.deque[bytes] = collections.deque(maxlen=200)
    stream = PrefixedStream(source, target, "worker 0", 0, last_lines)
    for chunk in chunks:
        os.write(writer, chunk)
        assert stream.read()
    os.close(writer)
    assert not stream.read()
    os.close(source)
    return target.getvalue(), last_lines


def test_partial_lines_are_joined():
    text, _ = pass_on(b"a", b"b\nc", b"d\r", b"\ne\r", b"f\n", b"\n", b"g\r")
    lines = [b"ab", b"cd", b"e", b"f", b"", b"g"]
    assert text == b"".join(b"worker 0 | " + line + b"\n" for line in lines)


def test_endless_line_is_flushed():
    text, _ = pass_on(*[b"x" * 50_000] * 30)
    assert text.count(b"\n") == 2
    assert text.count(b"x") == 1_500_000


def test_failure_reason_is_traceback_or_last_lines():
    numbers = [f"{number}\n".encode() for number in range(50)]
    _, last_lines = pass_on(*numbers)
    expected = [str(number).encode() for number in range(30, 50)]
    assert failure_lines(last_lines) == expected
    traceback = b"Traceback (most recent call last):\n  line\nError: why\n"
    _, last_lines = pass_on(*numbers, traceback)
    assert failure_lines(last_lines) == traceback.splitlines()
    reason = b"keras_strategy: worker 1 ends. worker 0 raised KeyError\nin a loop\n"
    _, last_lines = pass_on(traceback, reason)
    assert failure_lines(last_lines) == reason.splitlines()
    note = b"keras_strategy: the training step had begun\n"  # a part of the traceback
    _, last_lines = pass_on(traceback, note)
    assert failure_lines(last_lines) == [*traceback.splitlines(), note[:-1]]
