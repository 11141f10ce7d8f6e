"""Which addresses of a host can be reached from the others, and which are used."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from horovod.common.rendezvous.loop import Loop
from horovod.runner import reachability
from horovod.runner.reach_map import ReachMap
from horovod.runner.reachability import Endpoint, ProbeListener, Prober, own_addresses, probe_key

KEY = probe_key("secret", "job")
A1, A2 = Endpoint("eth0", "10.0.0.1", 1), Endpoint("eth1", "10.1.0.1", 2)
B1, B2 = Endpoint("eth0", "10.0.0.2", 3), Endpoint("eth1", "10.1.0.2", 4)
C1 = Endpoint("eth0", "10.0.0.3", 5)


def probe(targets: dict[str, list[Endpoint]], key: bytes = KEY) -> dict[tuple[str, str], str]:
    loop = Loop()
    listener = ProbeListener(loop, KEY, "here", [("lo", "127.0.0.1"), ("lo", "192.0.2.77")])
    assert [endpoint.address for endpoint in listener.endpoints] == ["127.0.0.1"]  # The other is not of this machine.
    found: dict[tuple[str, str], str] = {}
    all_targets = {"here": listener.endpoints, **targets}
    Prober(loop, key, all_targets, lambda host, address, trouble: found.update({(host, address): trouble}))
    expected = sum(map(len, all_targets.values()))
    assert loop.run_until(lambda: len(found) == expected, time.monotonic() + 20)
    listener.close()
    assert loop.next_time() is None or not loop.run_until(lambda: False, time.monotonic() + 0.01)
    loop.close()
    return found


def test_a_host_that_listens_is_reached_and_one_that_does_not_is_told_why() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))
        nobody = Endpoint("lo", "127.0.0.2", closed.getsockname()[1])
        found = probe({"there": [nobody]})
    assert found == {("here", "127.0.0.1"): "", ("there", "127.0.0.2"): "Connection refused"}


def test_somebody_else_at_an_address_is_not_the_host() -> None:
    assert probe({}, probe_key("another secret", "job")) == {("here", "127.0.0.1"): "somebody else has this address"}


def test_silence_ends_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.3", 0)) as silent:
        target = Endpoint("lo", "127.0.0.3", silent.getsockname()[1])
        monkeypatch.setattr(reachability, "PROBE_SECONDS", 0.3)
        found = probe({"silent": [target]})
    assert found["silent", "127.0.0.3"] == "no answer within 0.3 s"


def test_strangers_keep_nobody_out_and_learn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_MAX_STRANGERS", 5)
    loop = Loop()
    listener = ProbeListener(loop, KEY, "here", [("lo", "127.0.0.1")])
    (endpoint,) = listener.endpoints
    strangers = [socket.create_connection((endpoint.address, endpoint.port)) for _ in range(20)]
    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")  # Shorter than a challenge, so it gets no answer.
    found: list[str] = []
    Prober(loop, KEY, {"here": [endpoint]}, lambda _host, _address, trouble: found.append(trouble))
    assert loop.run_until(lambda: bool(found), time.monotonic() + 20)
    assert found == [""]
    listener.close()
    loop.close()
    for stranger in strangers:
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()


def test_loopback_and_link_local_addresses_lead_nowhere() -> None:
    assert not any(address.startswith(("127.", "fe80")) or address == "::1" for _, address in own_addresses([]))
    assert ("lo", "127.0.0.1") in own_addresses(["lo"])


def test_the_first_address_that_all_reach_is_chosen_as_soon_as_it_is_known() -> None:
    reached = ReachMap({"a": [A1, A2], "b": [B1, B2], "c": [C1]})
    for by, host, address, trouble in [
        ("b", "a", "10.0.0.1", ""),
        ("c", "a", "10.0.0.1", ""),
        ("a", "b", "10.0.0.2", "refused"),
        ("a", "c", "10.0.0.3", ""),
        ("b", "c", "10.0.0.3", ""),
        ("a", "b", "10.1.0.2", ""),
    ]:
        assert reached.choose() is None
        reached.note(by, host, address, trouble)
    reached.note("a", "b", "10.9.9.9", "")  # Nobody listens there.
    assert reached.choose() is None
    reached.note("c", "b", "10.1.0.2", "")
    assert reached.choose() == {"a": A1, "b": B2, "c": C1}


def test_the_report_says_who_could_not_reach_whom_when_all_is_known() -> None:
    reached = ReachMap({"a": [A1], "b": [B1, B2], "c": [C1]})
    for by, host, address, trouble in [
        ("b", "a", "10.0.0.1", ""),
        ("c", "a", "10.0.0.1", ""),
        ("a", "c", "10.0.0.3", ""),
        ("b", "c", "10.0.0.3", ""),
        ("a", "b", "10.0.0.2", "refused"),
        ("c", "b", "10.0.0.2", "refused"),
        ("a", "b", "10.1.0.2", "no answer"),
        ("c", "b", "10.1.0.2", ""),
    ]:
        assert reached.choose() is None
        reached.note(by, host, address, trouble)
    assert reached.choose() == {"a": A1, "c": C1}
    assert reached.report().splitlines() == [
        "  b can't be reached by all others:",
        "    at 10.0.0.2 (eth0) from a, c: refused",
        "    at 10.1.0.2 (eth1) from a: no answer",
    ]
