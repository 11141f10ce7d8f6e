"""What the director (run.py's process) and the ranks say to each other: lines of JSON over a Unix socket.

A rank says hello with its team and number. Then the director asks and all ranks of a team answer, one question at a
time; a rank that has no question sleeps, so that only one team is at work.
"""

import json
import socket
from typing import Any


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes a connected socket."""
        self._connection = connection
        self._reader = connection.makefile("rb")

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the other side has gone.

        Raises:
            TimeoutError: It did not come in the time that the socket has.
        """
        text = self._reader.readline()
        if not text.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._reader.close()
        self._connection.close()


def call_director(path: str, team: str, rank: int) -> Line:
    """A rank's connection to the director that listens at this path."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    line = Line(connection)
    line.say({"team": team, "rank": rank})
    return line
