"""What comes over ssh from an agent, or to one: any bytes are frames, or refused as none."""

import contextlib

import atheris
import targets

with atheris.instrument_imports(include=["horovod"]):
    from horovod.common.rendezvous.encoding import ProtocolError
    from horovod.runner.agent_frames import MARK, Fields, FrameParser, Kind, decode_output, encode_fields, encode_frame


def target(data: bytes) -> None:
    """Feeds the bytes in pieces, and reads every body as everything it could be."""
    size = 1 + data[0] % 64 if data else 1
    parser = FrameParser(after_mark=bool(data and data[0] & 64))
    try:
        for at in range(1, len(data), size):
            for _, body in parser.feed(data[at : at + size]):
                read(body)
    except ProtocolError as error:
        assert str(error)


def read(body: bytes) -> None:
    """Reads a body."""
    with contextlib.suppress(ProtocolError):
        decode_output(body)
    with contextlib.suppress(ProtocolError):
        fields = Fields(body)
        fields.texts("a"), fields.text_map("b"), fields.rows("c", str, int), fields.get("d", int)


SEEDS = (
    b"\0" + encode_frame(Kind.ALIVE) + encode_frame(Kind.OUTPUT, b"\0\0\0\1\1text"),
    b"\x47Welcome" + MARK + encode_frame(Kind.HELLO, encode_fields(a=["x"], b={"k": "v"}, c=[["s", 1]], d=2)),
    b"\x3f" + encode_frame(Kind.REACHED, encode_fields(host="h", address="::1", trouble="")),
)

if __name__ == "__main__":
    targets.run(target, SEEDS)
