"""Lines of workers -> prefixed lines of the launcher.

Words: a *stream* is stdout or stderr of one worker. A *screen* is a file that the launcher writes to; its stdout and
stderr are one screen if they are the same terminal, pipe or file. A *row* is what stands on the screen since its last
newline. A *segment* is text of a stream with what ended it: a newline, a carriage return, or nothing yet.

  - A segment ended by a newline or carriage return is forwarded at once, with the prefix in front of each: a progress
    bar redraws its own row, prefix included.
  - A segment without an end (a prompt, `print(end="")`, a bar that begins with its carriage return as tqdm's do) is
    forwarded when its stream has been quiet for a moment, or has grown too long to hold.
  - A row belongs to the stream that began it. When another one has something to say, the row is ended by a newline
    first, and its owner goes on later in a row of its own, with its prefix. One exception: on a terminal the bars of
    several ranks take turns in one row instead of filling the screen.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections import deque
from typing import BinaryIO

from horovod.runner.sink import Sink

# How long a stream is quiet before the segment it has begun is shown. In a log whole lines matter more than haste.
TERMINAL_QUIET_SECONDS = 0.1
FILE_QUIET_SECONDS = 1.0
# The longest segment held back. Longer lines are forwarded in pieces.
SEGMENT_CHARACTERS = 64 << 10
TAIL_LINES = 20
TAIL_CHARACTERS = 1000

_ENDS = re.compile(r"([\r\n])")
_ERASE_ROW = "\r\x1b[K"
# Foreground colours that are readable on dark and on light ground.
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


class Screen:
    """A file that the launcher writes to, and who owns its current row."""

    def __init__(self, sink: Sink, is_terminal: bool, colours: bool, timestamps: bool) -> None:
        """Write to `sink`; `timestamps` puts the time in front of every prefix."""
        self.sink = sink
        self.quiet_seconds = TERMINAL_QUIET_SECONDS if is_terminal else FILE_QUIET_SECONDS
        self._is_terminal = is_terminal
        self._colours = colours
        self._timestamps = timestamps
        self._owner: WorkerStream | None = None
        self._owner_returned = False  # The row's last character was a carriage return.
        self._owner_is_bar = False

    def _prefix(self, stream: WorkerStream) -> str:
        time_text = time.asctime() if self._timestamps else ""
        prefix = f"{time_text}[{stream.rank}]<{stream.name}>:"
        return f"\x1b[{_COLOURS[stream.rank % len(_COLOURS)]}m{prefix}\x1b[0m" if self._colours else prefix

    def emit(self, stream: WorkerStream, text: str, end: str, is_bar: bool) -> None:
        """Show one segment; `end` is a newline, a carriage return or empty."""
        if not text and end != "\n" and (end == "" or self._owner is not stream or self._owner_returned):
            return  # Nothing to see, and the cursor is at the start of the row already.
        before = ""
        if self._owner is not None and self._owner is not stream:
            before = _ERASE_ROW if self._is_terminal and self._owner_is_bar and is_bar else "\n"
            self._owner = None
        if self._owner is None:
            before += self._prefix(stream)
        elif self._owner_returned and text:
            before = self._prefix(stream)
        self._write(before + text + end)
        self._owner = None if end == "\n" else stream
        self._owner_returned = end == "\r"
        self._owner_is_bar = is_bar

    def emit_lines(self, stream: WorkerStream, lines: list[str]) -> None:
        """Show whole lines, after a segment that ended with a newline."""
        prefix = self._prefix(stream)
        self._write("".join([f"{prefix}{line}\n" for line in lines]))

    def message(self, text: str) -> None:
        """Show lines of the launcher itself."""
        self.end_row()
        self._write(text + "\n")

    def end_row(self) -> None:
        """Begin a new row if one is open."""
        if self._owner is not None:
            self._write("\n")
            self._owner = None

    def _write(self, text: str) -> None:
        self.sink.write(text.encode("utf-8", "replace"))


class Tail:
    """The last lines of a stream."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._current = ""
        self._returned = False

    def add(self, text: str, end: str) -> None:
        """Add a segment. What a carriage return took back is not kept."""
        if text and self._returned:
            self._current = ""
        self._current = (self._current + text[: TAIL_CHARACTERS + 1])[: TAIL_CHARACTERS + 1]
        self._returned = end == "\r"
        if end == "\n":
            self._lines.append(self._current)
            self._current = ""

    def lines(self) -> list[str]:
        """The lines, oldest first, long ones shortened."""
        lines = [*self._lines, self._current] if self._current else list(self._lines)
        return [
            line if len(line) <= TAIL_CHARACTERS else line[:TAIL_CHARACTERS] + " [...]" for line in lines[-TAIL_LINES:]
        ]


class WorkerStream:
    """stdout or stderr of one worker: bytes in, segments out."""

    def __init__(self, rank: int, name: str, screen: Screen, copy: BinaryIO | None = None) -> None:
        """Forward to `screen`; `copy`, if given, gets the bytes as they are."""
        self.rank = rank
        self.name = name
        self.screen = screen
        self.tail = Tail()
        self.quiet_at: float | None = None  # When to show the segment that has no end yet.
        self._copy = copy
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._is_bar = False  # The segment being received follows a carriage return.

    def feed(self, data: bytes) -> None:
        """Take what the worker wrote."""
        self._save(data)
        self._take(self._decoder.decode(data))
        if len(self._pending) > SEGMENT_CHARACTERS:
            self.show_pending()
        self.quiet_at = time.monotonic() + self.screen.quiet_seconds if self._pending else None

    def show_pending(self) -> None:
        """Show the segment that has no end yet."""
        self._segment(self._pending, "")
        self._pending = ""
        self.quiet_at = None

    def close(self) -> None:
        """Show what is left: the stream has ended."""
        self._take(self._decoder.decode(b"", final=True))
        if self._pending:
            self._segment(self._pending, "\n")
            self._pending = ""
        self.quiet_at = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _take(self, text: str) -> None:
        parts = _ENDS.split(self._pending + text)
        self._pending = parts.pop()
        if not parts:
            return
        self._segment(parts[0], parts[1])
        if "\r" not in parts:  # The common case, lines of plain text, in one go.
            lines = parts[2::2]
            self.screen.emit_lines(self, lines)
            for line in lines[-TAIL_LINES:]:
                self.tail.add(line, "\n")
            return
        for i in range(2, len(parts), 2):
            self._segment(parts[i], parts[i + 1])

    def _segment(self, text: str, end: str) -> None:
        self.screen.emit(self, text, end, is_bar=end == "\r" or (self._is_bar and end == ""))
        self.tail.add(text, end)
        self._is_bar = end == "\r" or (self._is_bar and end == "")

    def _save(self, data: bytes) -> None:
        if self._copy is None:
            return
        try:
            self._copy.write(data)
        except OSError as error:
            self._copy = None
            self.screen.message(
                f"horovodrun: the {self.name} of rank {self.rank} is no longer saved in its file: {error.strerror}"
            )


def open_screens(wake_fd: int, timestamps: bool) -> tuple[Screen, Screen]:
    """The screens of the launcher's stdout and stderr: one and the same if both are one file.

    Args:
        wake_fd: An eventfd to be written when a full or awaited sink has emptied.
        timestamps: Whether to put the time in front of every line.

    Returns:
        Screen of stdout, screen of stderr.
    """

    def wake() -> None:
        os.eventfd_write(wake_fd, 1)

    def screen(fd: int) -> Screen:
        is_terminal = os.isatty(fd)
        colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return Screen(Sink(fd, wake), is_terminal, colours, timestamps)

    out = screen(1)
    out_file, err_file = os.fstat(1), os.fstat(2)
    same = (out_file.st_dev, out_file.st_ino) == (err_file.st_dev, err_file.st_ino)
    return out, out if same else screen(2)
