"""What workers write, line by line, with their names in front."""

import collections
import os
import re
from typing import BinaryIO

# A progress bar ends its lines with a carriage return alone. One at the very end may be
# the first half of "\r\n".
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST = 1 << 20
_KEPT = 200
_WITHOUT_TRACEBACK = 20
_COLOURS = (36, 33, 35, 32, 34, 31)


class LastLines:
    """The last lines that a worker wrote, to either of its streams."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT)

    def add(self, line: bytes) -> None:
        """Remembers a line."""
        self._lines.append(line)

    def reason(self) -> list[bytes]:
        """The lines from the first traceback on, or else the last few."""
        lines = list(self._lines)
        for number, line in enumerate(lines):
            if line.startswith(b"Traceback (most recent call last)"):
                return lines[number:]
        return lines[-_WITHOUT_TRACEBACK:]


class PrefixedStream:
    """Passes on one stream of a worker.

    Args:
        source: The file descriptor to read from.
        target: Where whole lines go.
        name: What stands in front of each line.
        number: The worker's rank, which picks a colour.
        last_lines: Is told every line, too.
    """

    def __init__(
        self,
        source: int,
        target: BinaryIO,
        name: str,
        number: int,
        last_lines: LastLines,
    ) -> None:
        self.source = source
        self._target = target
        self._prefix = f"{name} | ".encode()
        if target.isatty() and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[number % len(_COLOURS)]
            self._prefix = b"\x1b[%dm%s\x1b[0m" % (colour, self._prefix)
        self._last_lines = last_lines
        self._rest = b""

    def read(self) -> bool:
        """Passes on what is there; false when the stream has ended."""
        data = os.read(self.source, 1 << 16)
        if not data:
            self.finish()
            return False
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return True

    def finish(self) -> None:
        """Passes on a last line that has no end."""
        if self._rest:
            self._write([self._rest.removesuffix(b"\r")])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            self._last_lines.add(line)
        # In one piece, so that lines of different workers do not mix.
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
