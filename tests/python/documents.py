"""The repository's Markdown pages as programs, sessions and commands.

Blocks of a page, by their language:

    python, yaml   the first line is a comment with a file name: the file is written for the sessions that follow
    console        a session: lines "$ command", and under each what it prints
    sh             commands that need more than a moment; tests check that they exist and who runs them

In a session a line of output may contain "..." for anything; a line that is only "..." stands for any lines. Lines may
come in any order, since those of different ranks do. A command must succeed unless the next one is "echo $?".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WILD = "..."

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# ([\w-]+\.\w+)\n")


@dataclass
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass
class Step:
    """A command of a session and the lines it should print."""

    command: str
    output: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def file_of(block: Block) -> tuple[str, str] | None:
    """The name and content of the file that a block shows, if it has a name."""
    match = _FILE_NAME.match(block.text)
    return (match[1], block.text) if match else None


def steps(block: Block) -> list[Step]:
    """The commands of a session."""
    found: list[Step] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:], []))
        else:
            assert found, f"{block}: a session begins with a command"
            found[-1].output.append(line)
    return found


def session_environment() -> dict[str, str]:
    """What a reader has who has activated the virtual environment that the tests run in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**inherited, "PATH": path, "NO_COLOR": "1"}


def run_session(block: Block, folder: Path, there: Callable[[list[str]], list[str]] = list) -> None:
    """Runs a session and compares what it prints.

    Args:
        block: The session.
        folder: Where.
        there: Makes of a command one that runs it on some other machine.

    Raises:
        AssertionError: Something else was printed, or a command failed unexpectedly.
    """
    session = steps(block)
    code = 0
    for step, following in zip(session, [*session[1:], None], strict=True):
        # The subshell hands the exit code of the command before on to "echo $?".
        ended = subprocess.run(
            there(["bash", "-c", f"(exit {code})\n{step.command}"]),
            cwd=folder,
            env=session_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,  # importing a framework takes seconds, compiling with one more
            check=False,
        )
        code = ended.returncode
        told = f"{block}: $ {step.command}\n{ended.stdout}"
        if following is None or following.command != "echo $?":
            assert code == 0, f"{told}(exit code {code})"
        difference = compare(step.output, ended.stdout.splitlines())
        assert not difference, f"{told}{difference}"


def compare(expected: list[str], printed: list[str]) -> str:
    """What differs between the lines that a page shows and those that came; empty if nothing does."""
    left = Counter(printed)
    for line in expected:
        if line == WILD:
            continue
        pattern = ".*".join(re.escape(part) for part in line.split(WILD))
        found = next((candidate for candidate in left if left[candidate] and re.fullmatch(pattern, candidate)), None)
        if found is None:
            return f"expected, but not printed: {line!r}"
        left[found] -= 1
    unexpected = [line for line in left.elements() if line]
    return f"printed, but not expected: {unexpected}" if unexpected and WILD not in expected else ""
