"""Called by a rank, before init: has its connections to others go by way of a recorder, which sees every byte."""

import contextlib
import socket
import threading
from typing import Any

from horovod.common.rendezvous import meeting, mesh
from horovod.common.rendezvous.caller import Address
from horovod.common.rendezvous.messages import socket_address


class Recorder:
    """Passes connections on to an address, and keeps what went over them in either direction."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = (socket.AF_INET, self._listener.getsockname())
        self._lock = threading.Lock()
        self._seen: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def seen(self) -> list[bytes]:
        """What was sent so far, one entry for each direction of each connection."""
        with self._lock:
            return [bytes(part) for part in self._seen]

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            family, address = self._target
            far = socket.socket(family, socket.SOCK_STREAM)
            try:
                far.connect(address)
            except OSError:  # nobody listens yet
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        record = bytearray()
        with self._lock:
            self._seen.append(record)
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                with self._lock:
                    record += part
                sink.sendall(part)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def record_everything() -> dict[str, list[Recorder]]:
    """Has this rank connect through recorders: `rendezvous` to the server, `ranks` to other ranks."""
    recorders: dict[str, list[Recorder]] = {"rendezvous": [], "ranks": []}

    def by_way_of(name: str, address: Address) -> Address:
        recorder = Recorder(address)
        recorders[name].append(recorder)
        return recorder.address

    resolve = meeting._where_hosts_meet

    def detour_to_server(network: Any, timeout: float) -> list[Address]:
        return [by_way_of("rendezvous", address) for address in resolve(network, timeout)]

    def detour_to_rank(endpoint: Any) -> Any:
        return by_way_of("ranks", socket_address(endpoint))

    meeting._where_hosts_meet = detour_to_server
    mesh.socket_address = detour_to_rank  # type: ignore[attr-defined]
    return recorders
