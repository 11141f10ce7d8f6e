"""What workers write comes out of horovodrun line by line, with a prefix, and intact."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import HOROVODRUN, Launcher, TerminalLauncher, run, script
from waiting import wait_until


def write(*pieces: str | bytes, to: str = "1") -> str:
    """Source that writes pieces, each with a system call of its own."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return f"for piece in {data!r}: os.write({to}, piece)\n"


def test_every_line_has_its_rank_and_stream() -> None:
    code, out, err = run("-np", "2", *script(write("a\nb\n\n") + write("c\n", to="2")))
    assert code == 0
    for rank in "01":
        assert [x for x in out.splitlines() if x.startswith(f"[{rank}]")] == [
            f"[{rank}]<stdout>:a",
            f"[{rank}]<stdout>:b",
            f"[{rank}]<stdout>:",
        ]
    assert sorted(err.splitlines()) == ["[0]<stderr>:c", "[1]<stderr>:c"]


def test_lines_are_forwarded_as_they_come(tmp_path: Path) -> None:
    go = tmp_path / "go"
    worker = script(f"print('first')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('second')")
    with Launcher("-np", "1", *worker) as launcher:
        assert launcher.process.stdout is not None
        assert launcher.process.stdout.readline() == b"[0]<stdout>:first\n"
        go.touch()
        assert launcher.finish()[:2] == (0, "[0]<stdout>:second\n")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["10%\r", "20%\r", "done\n"], "[0]<stdout>:10%\r[0]<stdout>:20%\r[0]<stdout>:done\n"),
        (["10%\r20%\r\n"], "[0]<stdout>:10%\r[0]<stdout>:20%\r\n"),  # A bar ended by its newline stays as it is.
        (["\r10%", "\r20%", "\n"], "[0]<stdout>:10%\r[0]<stdout>:20%\n"),  # tqdm's way.
        (["dos\r\nlines\r", "\n"], "[0]<stdout>:dos\r\n[0]<stdout>:lines\r\n"),
        (["no end"], "[0]<stdout>:no end\n"),
        (["10%\r"], "[0]<stdout>:10%\r\n"),
        (["b\xe4r\n".encode()[:2], "b\xe4r\n".encode()[2:]], "[0]<stdout>:b\xe4r\n"),  # Cut within a character.
        ([b"a\xff\xe4b\n\xe2\x82"], "[0]<stdout>:a\ufffd\ufffdb\n[0]<stdout>:\ufffd\n"),  # No UTF-8.
    ],
)  # fmt: skip
def test_what_is_written_and_what_comes_out(pieces: list[str | bytes], expected: str) -> None:
    process = subprocess.run([*HOROVODRUN, "-np", "1", *script(write(*pieces))], stdout=subprocess.PIPE, check=True)
    assert process.stdout.decode() == expected


LOADING = write("Loading...") + "while not os.path.exists(os.environ['GO']): time.sleep(0.01)\nprint(' done')"


def test_a_line_without_an_end_is_shown_after_a_quiet_moment(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Launcher("-np", "1", *script(LOADING), GO=str(go)) as launcher:
        assert launcher.process.stdout is not None
        assert os.read(launcher.process.stdout.fileno(), 100) == b"[0]<stdout>:Loading..."
        go.touch()
        assert launcher.finish()[:2] == (0, " done\n")


def test_a_line_without_an_end_is_shown_on_a_terminal_too(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with TerminalLauncher("-np", "1", *script(LOADING), NO_COLOR="1", GO=str(go)) as launcher:
        assert os.read(launcher.master, 100) == b"[0]<stdout>:Loading..."
        go.touch()
        assert launcher.read_terminal() == " done\r\n"


def screen_rows(text: str) -> list[str]:
    """What a terminal would show: carriage returns overwrite, ESC[K erases to the end of the row."""
    rows = []
    for line in text.replace("\r\n", "\n").split("\n"):
        row = ""
        column = 0
        for token in re.findall(r"\x1b\[K|\r|[^\r\x1b]+", line):
            if token == "\r":
                column = 0
            elif token == "\x1b[K":
                row = row[:column]
            else:
                row = row[:column] + token + row[column + len(token) :]
                column += len(token)
        rows.append(row)
    return rows


def play(folder: Path, *moves: tuple[int, str]) -> list[str]:
    """Have two ranks write in turn, each when the one before is seen on the terminal; returns the rows at the end."""
    worker = script(f"""
        for number, (who, text) in enumerate({moves!r}):
            if who == rank:
                while not os.path.exists({str(folder)!r} + f'/{{number}}'): time.sleep(0.01)
                os.write(1, text.encode())
    """)
    seen = b""
    with TerminalLauncher("-np", "2", *worker, NO_COLOR="1") as launcher:
        for number, (_, text) in enumerate(moves):
            (folder / str(number)).touch()
            before = len(seen)
            while text.strip().encode() not in seen[before:]:
                seen += os.read(launcher.master, 65536)
        return screen_rows(seen.decode() + launcher.read_terminal())


def test_a_bar_redraws_its_own_row(tmp_path: Path) -> None:
    assert play(tmp_path, (0, "\r10%"), (0, "\r20%"), (0, "\r30%\n")) == ["[0]<stdout>:30%", ""]


def test_a_line_of_another_rank_does_not_spoil_a_bar(tmp_path: Path) -> None:
    moves = ((0, "\r10% of a long bar"), (1, "hello\n"), (0, "\r20% of a long bar"), (0, "\r30% of a long bar\n"))
    assert play(tmp_path, *moves) == [
        "[0]<stdout>:10% of a long bar",
        "[1]<stdout>:hello",
        "[0]<stdout>:30% of a long bar",
        "",
    ]


def test_bars_of_two_ranks_take_turns_in_one_row(tmp_path: Path) -> None:
    moves = (
        (0, "\r10% of a long bar"),
        (1, "\r5% other"),
        (0, "\r20% of a long bar"),
        (1, "\r9% other\n"),
        (0, "\r30%\n"),
    )
    # The bar of rank 0 as it was stands above the final line of rank 1.
    assert play(tmp_path, *moves) == [
        "[0]<stdout>:20% of a long bar",
        "[1]<stdout>:9% other",
        "[0]<stdout>:30%",
        "",
    ]


def test_very_long_lines_arrive_whole_and_are_not_held_in_memory() -> None:
    size = 64 << 20
    worker = script(f"for _ in range({size >> 20}): os.write(1, b'x' * (1 << 20))\nos.write(1, b'\\n')\ntime.sleep(60)")
    with Launcher("-np", "1", *worker) as launcher:
        assert launcher.process.stdout is not None
        received = 0
        while received < size + len("[0]<stdout>:\n"):
            received += len(os.read(launcher.process.stdout.fileno(), 1 << 20))
        status = Path(f"/proc/{launcher.supervisor()}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) < 80 << 10
        launcher.process.terminate()
        assert launcher.finish()[:2] == (143, "")


def test_a_reader_that_has_gone_does_not_disturb_the_workers(tmp_path: Path) -> None:
    done = tmp_path / "done"
    worker = script(f"for i in range(200_000): print('line', i)\nopen({str(done)!r} + str(rank), 'w').close()")
    with Launcher("-np", "2", *worker) as launcher:
        assert launcher.process.stdout is not None and launcher.process.stderr is not None
        launcher.process.stdout.readline()
        launcher.process.stdout.close()
        assert launcher.process.wait(30) == 0
        assert launcher.process.stderr.read() == b""
    assert len(list(tmp_path.glob("done*"))) == 2


def test_output_that_finds_no_room_is_lost_but_told_and_the_job_goes_on(tmp_path: Path) -> None:
    limited = 'trap \'\' XFSZ; ulimit -f 1; exec "$@" > "$0"'  # One block, of 512 or 1024 bytes.
    job = ["-np", "1", *script("for i in range(1000): print(f'line {i:3}')\nprint('done', file=sys.stderr)")]
    done = subprocess.run(
        ["sh", "-c", limited, str(tmp_path / "log"), *HOROVODRUN, *job], capture_output=True, text=True, check=False
    )
    told = "horovodrun: output is lost, since stdout can't be written: File too large"
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, ["[0]<stderr>:done", told])
    assert (tmp_path / "log").read_text().startswith("[0]<stdout>:line   0\n")


def test_a_reader_that_does_not_read_keeps_nobody_from_seeing_a_failure(tmp_path: Path) -> None:

    # Rank 0 fills everything up to the pipe that nobody reads; then rank 1 fails.
    full = tmp_path / "full"
    worker = script(f"""
        if rank == 0:
            os.set_blocking(1, False)
            blocked_since = None
            while blocked_since is None or time.monotonic() < blocked_since + 0.5:
                try:
                    os.write(1, b'x' * 999 + b'\\n')
                    blocked_since = None
                except BlockingIOError:
                    blocked_since = blocked_since or time.monotonic()
                    time.sleep(0.01)
            open({str(full)!r}, 'w').close()
            time.sleep(60)
        while not os.path.exists({str(full)!r}): time.sleep(0.01)
        sys.exit(5)
    """)

    with Launcher("-np", "2", *worker) as launcher:
        assert launcher.process.stderr is not None
        assert launcher.process.stderr.readline() == b"Process 1 exit with status code 5.\n"
        # All workers are gone while the output still waits for its reader: launcher and supervisor are left.
        wait_until(lambda: len(launcher.living()) == 2, "the workers are ended")
        code, out, _ = launcher.finish()
    assert code == 5
    assert len(out) > 4 << 20
    assert set(out.splitlines()[:-1]) == {"[0]<stdout>:" + "x" * 999}


def test_an_unread_output_can_be_interrupted() -> None:
    with Launcher("-np", "1", *script("os.write(1, b'x' * (1 << 20))")) as launcher:
        wait_until(lambda: len(launcher.living()) == 2, "launcher and supervisor run", 20)
        wait_until(lambda: not _children(launcher.supervisor()), "the worker has ended")
        launcher.process.terminate()
        assert launcher.process.wait(20) == 143
        assert launcher.living() == []


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_colours_on_a_terminal_only() -> None:
    echo = ["echo", "hi"]
    with TerminalLauncher("-np", "1", *echo, TERM="xterm") as launcher:
        assert launcher.read_terminal() == "\x1b[36m[0]<stdout>:\x1b[0mhi\r\n"
    for quiet in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with TerminalLauncher("-np", "1", *echo, **quiet) as launcher:
            assert launcher.read_terminal() == "[0]<stdout>:hi\r\n"
    assert run("-np", "1", *echo, TERM="xterm") == (0, "[0]<stdout>:hi\n", "")


@pytest.mark.parametrize("option", ["-prefix-timestamp", "--prefix-output-with-timestamp"])
def test_timestamps(option: str) -> None:
    code, out, _ = run("-np", "1", option, "printf", r"a\nb\n")
    assert code == 0
    stamp = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d \d{4}"
    assert re.fullmatch(rf"{stamp}\[0\]<stdout>:a\n{stamp}\[0\]<stdout>:b\n", out)


@pytest.mark.parametrize(("np", "names"), [(1, ["rank.0"]), (11, [f"rank.{n:02}" for n in range(11)])])
def test_output_files_hold_the_bytes_as_they_were(np: int, names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    code, out, _ = run(
        "-np", str(np), "--output-filename", str(folder), *script(write(b"a\xff\rb") + write("e", to="2"))
    )
    assert code == 0 and "<stdout>:b" in out
    assert sorted(os.listdir(folder)) == names
    for name in names:
        assert (folder / name / "stdout").read_bytes() == b"a\xff\rb"
        assert (folder / name / "stderr").read_bytes() == b"e"


def test_standard_streams_may_be_closed() -> None:
    command = 'exec "$@" <&- >&- 2>&-'
    worker = script("print('x')\nprint('y', file=sys.stderr)")
    assert subprocess.run(["sh", "-c", command, "sh", *HOROVODRUN, "-np", "2", *worker], check=False).returncode == 0
