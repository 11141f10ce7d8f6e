"""What launcher and agents say to each other, as bytes."""

from __future__ import annotations

import os
import time
import tracemalloc

import pytest

from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.loop import Loop
from horovod.runner.agent_frames import (
    MARK,
    MAX_BODY,
    MAX_NOISE,
    Fields,
    FrameParser,
    FramePipe,
    Kind,
    decode_output,
    encode_fields,
    encode_frame,
    encode_output,
)
from horovod.runner.crew import Stream
from horovod.runner.heartbeat import Heartbeat

FRAMES = [(Kind.HELLO, b"{}"), (Kind.ALIVE, b""), (Kind.OUTPUT, encode_output(3, Stream.STDERR, b"text"))]
BYTES = b"".join(encode_frame(kind, body) for kind, body in FRAMES)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("noise", [b"", b"Welcome!\n", b"x" * 10000 + MARK[:5], MARK[:3] * 4])
def test_frames_are_found_behind_any_noise_in_any_pieces(step: int, noise: bytes) -> None:
    parser = FrameParser(after_mark=True)
    data = noise + MARK + BYTES
    found = [frame for at in range(0, len(data), step) for frame in parser.feed(data[at : at + step])]
    assert found == FRAMES
    assert parser.noise() == noise[-MAX_NOISE:]


def test_noise_without_a_mark_is_kept() -> None:
    parser = FrameParser(after_mark=True)
    assert list(parser.feed(b"This account is not available.")) == []
    assert parser.noise() == b"This account is not available."


@pytest.mark.parametrize("data", [b"\xff\0\0\0\0", encode_frame(Kind.ALIVE)[:1] + (MAX_BODY + 1).to_bytes(4, "big")])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameParser(after_mark=False).feed(data))


def test_fields_keep_every_text_and_check_every_type() -> None:
    fields = Fields(encode_fields(text="\udcff\n\0 ü", number=1, texts=["a"], map={"a": "b"}, rows=[["a", 1]]))
    assert fields.get("text", str) == "\udcff\n\0 ü"
    assert fields.texts("texts") == ["a"] and fields.text_map("map") == {"a": "b"}
    assert fields.rows("rows", str, int) == [("a", 1)]
    for refused in (
        lambda: fields.get("number", str),
        lambda: fields.get("nothing", int),
        lambda: fields.texts("rows"),
        lambda: fields.text_map("texts"),
        lambda: fields.rows("rows", int, str),
        lambda: fields.rows("texts", str),
        lambda: Fields(b"[1]"),
        lambda: Fields(b"{"),
        lambda: Fields(b"[" * 100_000),
        lambda: decode_output(b"\0\0\0\0"),
        lambda: decode_output(b"\0\0\0\0\x09"),
    ):
        with pytest.raises(ProtocolError):
            refused()


def test_a_pipe_never_blocks_and_tells_its_end_once() -> None:
    loop = Loop()
    read_end, write_end = os.pipe()
    other_read, other_write = os.pipe()
    heard: list[bytes] = []
    ends: list[str] = []
    sender = FramePipe(loop, other_read, write_end, lambda _kind, _body: None, ends.append, after_mark=False)
    receiver = FramePipe(
        loop, read_end, other_write, lambda _kind, body: heard.append(body), ends.append, after_mark=False
    )
    body = os.urandom(3 << 20)
    sender.say(Kind.PAYLOAD, body)
    assert sender.unsent() > 0  # More than a pipe holds.
    while not heard:
        loop.step(None)
    assert heard == [body] and sender.unsent() == 0
    sender.close()
    while not ends:
        loop.step(None)
    receiver.say(Kind.ALIVE)
    assert ends == ["it was closed"]
    loop.close()


def test_what_many_pipes_send_is_in_memory_once() -> None:
    loop = Loop()
    silent, never_written = os.pipe()
    ends = [os.pipe() for _ in range(10)]
    pipes = [
        FramePipe(loop, os.dup(silent), write_end, lambda _kind, _body: None, lambda _reason: None, after_mark=False)
        for _, write_end in ends
    ]
    small, large = encode_frame(Kind.ALIVE), encode_frame(Kind.PAYLOAD, os.urandom(8 << 20))
    frames = [small, large, small, small, large, small]
    tracemalloc.start()
    for pipe in pipes:
        for frame in frames:
            pipe.send(frame)
    assert tracemalloc.get_traced_memory()[1] < len(large)
    tracemalloc.stop()
    for pipe, (read_end, _) in zip(pipes, ends, strict=True):
        received = bytearray()
        while pipe.unsent():
            received += os.read(read_end, 1 << 20)
            loop.step(time.monotonic())
        received += os.read(read_end, 1 << 20)
        assert received == b"".join(frames)
        pipe.close()
        os.close(read_end)
    os.close(silent)
    os.close(never_written)
    loop.close()


def test_what_a_listener_raises_is_not_taken_for_the_end_of_the_pipe() -> None:
    loop = Loop()
    read_end, write_end = os.pipe()

    def fail(_kind: Kind, _body: bytes) -> None:
        raise FileNotFoundError("of the listener")

    ends: list[str] = []
    pipe = FramePipe(loop, read_end, os.dup(write_end), fail, ends.append, after_mark=False)
    os.write(write_end, encode_frame(Kind.ALIVE))
    with pytest.raises(FileNotFoundError, match="of the listener"):
        loop.step(None)
    assert ends == []
    pipe.close()
    os.close(write_end)
    loop.close()


def test_silence_is_noticed_once_and_only_silence() -> None:
    loop = Loop()
    beats: list[int] = []
    silences: list[float] = []
    heartbeat = Heartbeat(loop, 0.3, lambda: beats.append(1), silences.append)
    while len(beats) < 15:  # Longer than the limit.
        loop.step(None)
        heartbeat.heard()
    assert silences == []
    while not silences:
        loop.step(None)
    assert silences == [0.3] and loop.next_time() is None
    loop.close()
