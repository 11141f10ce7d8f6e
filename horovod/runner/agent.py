"""The launcher's agent on a host: `python -m horovod.runner.agent`, started by ssh.

It does what the launcher says (agent_frames.py): finds out which hosts it can reach, starts the workers of its host,
forwards their output and tells their deaths. When the connection ends, for whatever reason, it ends everything that it
has started, and then itself. The launcher has one on its own machine too, if other machines take part.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import sys
import time
import traceback

from horovod import __version__
from horovod.common.rendezvous.addresses import own_addresses
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.loop import READ, Loop
from horovod.runner import open_files, process_tree
from horovod.runner.agent_frames import (
    MARK,
    Fields,
    FramePipe,
    Kind,
    decode_output,
    encode_fields,
    encode_output,
)
from horovod.runner.crew import Stream, Task, Work
from horovod.runner.environment import Credentials, inherited
from horovod.runner.heartbeat import Heartbeat
from horovod.runner.local_crew import LocalCrew
from horovod.runner.reachability import Endpoint, ProbeListener, Prober, interface_names, probe_key
from horovod.runner.rendezvous import serve

# Workers' output that waits for the connection; beyond that they wait too.
MAX_UNSENT = 4 << 20
# Until the launcher has said how long.
FIRST_SILENCE_SECONDS = 60.0
GOODBYE_SECONDS = 5.0
_ALL_STREAMS = frozenset(Stream)


class Agent:
    """One agent; it tells the launcher what its crew tells."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        """Talks to the launcher over these."""
        self._loop = Loop()
        self._pipe = FramePipe(self._loop, read_fd, write_fd, self._on_frame, self._on_closed, after_mark=False)
        self._heartbeat = Heartbeat(
            self._loop, FIRST_SILENCE_SECONDS, lambda: self._pipe.say(Kind.ALIVE), self._on_silence
        )
        self._host = ""
        self._credentials = Credentials(job_id="", secret_key="")
        self._listener: ProbeListener | None = None
        self._prober: Prober | None = None
        self._payload = bytearray()
        self._crew: LocalCrew | None = None
        self._paused: frozenset[Stream] = frozenset()
        self._leaving = False  # The launcher has gone, or has nothing more for us to do.
        self._watch_signals()

    def run(self) -> None:
        """Works until nothing is left to do."""
        self._pipe.send(MARK)
        self._say(
            Kind.HELLO,
            version=__version__,
            python=platform.python_version(),
            name=socket.gethostname(),
            interfaces=interface_names(),
        )
        while not (self._leaving and (self._crew is None or self._crew.is_gone())):
            self._loop.step(None)
            if self._crew is not None:
                self._crew.is_gone()  # Reaps.
                self._crew.pause(_ALL_STREAMS if self._pipe.unsent() > MAX_UNSENT else self._paused)
        if self._crew is not None:
            self._crew.read_what_is_left()
        self._say(Kind.DONE)
        self._heartbeat.stop()
        timer = self._loop.at(time.monotonic() + GOODBYE_SECONDS, self._pipe.close)
        while self._pipe.unsent():
            self._loop.step(None)
        timer.cancel()

    # ---- What the crew tells ----------------------------------------------------------------------------------------

    def on_started(self, rank: int, pid: int) -> None:
        """A worker runs."""
        self._say(Kind.STARTED, rank=rank, pid=pid)

    def on_output(self, rank: int, stream: Stream, data: bytes) -> None:
        """A worker wrote something."""
        self._pipe.say(Kind.OUTPUT, encode_output(rank, stream, data))

    def on_closed(self, rank: int, stream: Stream) -> None:
        """Nothing more comes from a stream."""
        self._pipe.say(Kind.CLOSED, encode_output(rank, stream))

    def on_ended(self, rank: int, code: int) -> None:
        """A worker has ended."""
        self._say(Kind.ENDED, rank=rank, code=code)

    def on_trouble(self, text: str, exit_code: int) -> None:
        """Something else than a worker went wrong."""
        self._say(Kind.TROUBLE, text=text, code=exit_code)

    def on_word(self, text: str) -> None:
        """Something that the user should know."""
        self._say(Kind.WORD, text=text)

    # ---- What the launcher says -------------------------------------------------------------------------------------

    def _on_frame(self, kind: Kind, body: bytes) -> None:
        self._heartbeat.heard()
        if kind is Kind.ALIVE:
            return
        if kind is Kind.PAYLOAD:
            self._payload += body
        elif kind is Kind.PROBE:
            self._probe(Fields(body))
        elif kind is Kind.REACH:
            self._reach(Fields(body))
        elif kind is Kind.SERVE:
            self._serve(Fields(body))
        elif kind is Kind.START:
            self._start(Fields(body))
        elif kind is Kind.PAUSE:
            _, stream, state = decode_output(body)
            self._paused = self._paused | {stream} if state == b"1" else self._paused - {stream}
        elif kind is Kind.SIGNAL and self._crew is not None:
            self._crew.forward(Fields(body).get("signal", int))
        elif kind is Kind.END:
            self._end(Fields(body).get("signal", int))
        elif kind is Kind.KILL:
            self._end(signal.SIGKILL)
            if self._crew is not None:
                self._crew.kill()
        else:
            raise ProtocolError(f"{kind.name} is not for an agent, or not now")

    def _probe(self, fields: Fields) -> None:
        self._host = fields.get("host", str)
        self._credentials = Credentials(fields.get("job_id", str), fields.get("secret_key", str))
        wanted = fields.texts("interfaces")
        key = probe_key(self._credentials.secret_key, self._credentials.job_id)
        self._listener = ProbeListener(self._loop, key, self._host, own_addresses(wanted), self.on_word)
        endpoints = [[e.interface, e.address, e.port] for e in self._listener.endpoints]
        self._say(Kind.LISTENING, endpoints=endpoints)

    def _reach(self, fields: Fields) -> None:
        targets: dict[str, list[Endpoint]] = {}
        for host, interface, address, port in fields.rows("endpoints", str, str, str, int):
            targets.setdefault(host, []).append(Endpoint(interface, address, port))
        key = probe_key(self._credentials.secret_key, self._credentials.job_id)
        self._prober = Prober(
            self._loop,
            key,
            targets,
            lambda host, address, trouble: self._say(Kind.REACHED, host=host, address=address, trouble=trouble),
        )

    def _serve(self, fields: Fields) -> None:
        address = fields.get("address", str)
        try:
            port = serve(self._loop, address, self._credentials, fields.texts("host_of_rank"), self.on_word)
        except OSError as error:
            self.on_trouble(f"host {self._host} can't listen at {address}: {error.strerror}", 1)
            return
        self._say(Kind.SERVING, port=port)

    def _start(self, fields: Fields) -> None:
        self._stop_probing()
        if self._crew is not None:
            raise ProtocolError("START came twice")
        self._heartbeat.stop()
        self._heartbeat = Heartbeat(
            self._loop,
            max(1.0, fields.get("silence", float)),
            lambda: self._pipe.say(Kind.ALIVE),
            self._on_silence,
        )
        directory = fields.get("directory", str)
        host = fields.get("host", str)
        try:
            os.chdir(directory)
        except OSError as error:
            self.on_trouble(
                f"host {host}: the directory that horovodrun was started in, {directory}, can't be used there: "
                f"{error.strerror}. Start it in one that all hosts have.",
                2,
            )
            return
        # Home, user and shell are those of the login here; the launcher does not send its own.
        shared = {**inherited(os.environ), **fields.text_map("environment"), "PWD": directory}
        ranks, own = fields.get("ranks", list), fields.get("own", list)
        tasks = []
        for rank, variables in zip(ranks, own, strict=True):
            if type(rank) is not int or not isinstance(variables, dict):
                raise ProtocolError("START has other workers than expected")
            tasks.append(Task(rank, {**shared, **{str(name): str(value) for name, value in variables.items()}}))
        payload = bytes(self._payload) if fields.get("has_payload", bool) else None
        self._payload.clear()
        work = Work(fields.texts("command"), tasks, fields.get("grace", float), payload)
        self._crew = LocalCrew(self._loop, self, work, f" on host {host}")
        self._crew.start()

    def _end(self, signum: int) -> None:
        self._stop_probing()
        self._leaving = True
        if self._crew is not None:
            self._crew.end(signum)

    def _stop_probing(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._prober is not None:
            self._prober.close()

    # ---- The end ----------------------------------------------------------------------------------------------------

    def _on_closed(self, _reason: str) -> None:
        self._heartbeat.stop()
        self._end(signal.SIGTERM)

    def _on_silence(self, _seconds: float) -> None:
        self._pipe.close()
        self._end(signal.SIGTERM)

    def _watch_signals(self) -> None:
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)
        self._loop.watch(read_end, READ, lambda _events: self._on_signals(os.read(read_end, 4096)))

    def _on_signals(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum != signal.SIGCHLD:  # That one only wakes the loop, which reaps.
                self._end(signum)

    def _say(self, kind: Kind, **fields: object) -> None:
        self._pipe.say(kind, encode_fields(**fields))


def main() -> None:
    """Be the agent; ends the process."""
    read_fd, write_fd = (os.dup(fd) for fd in (0, 1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    open_files.allow_many()
    process_tree.become_subreaper()
    process_tree.set_process_name("horovod-agent")
    code = 1
    try:
        Agent(read_fd, write_fd).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        process_tree.kill_descendants()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
