"""Which addresses of a host can be reached from the others, and which are used."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from pathlib import Path

import pytest
from attacks import pickles

from horovod.common.rendezvous.addresses import own_addresses
from horovod.common.rendezvous.loop import Loop
from horovod.runner import reachability
from horovod.runner.reach_map import ReachMap
from horovod.runner.reachability import Endpoint, ProbeListener, Prober, probe_key

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


def test_strangers_keep_nobody_out_learn_nothing_and_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reachability, "_MAX_STRANGERS", 20)
    monkeypatch.setattr(reachability, "PROBE_SECONDS", 1.0)
    told: list[str] = []
    loop = Loop()
    listener = ProbeListener(loop, KEY, "here", [("lo", "127.0.0.1")], told.append)
    (endpoint,) = listener.endpoints
    attacks = [
        b"GET / HTTP/1.1\r\n\r\n",  # Shorter than a challenge, so it gets no answer.
        *pickles(tmp_path / "executed").values(),  # Longer: who goes on after a challenge is no host.
    ]
    strangers = []
    for number in range(40):
        address, source = (endpoint.address, endpoint.port), ("127.0.0.66" if number < 35 else f"127.66.0.{number}")
        strangers.append(socket.create_connection(address, source_address=(source, 0)))
    for stranger, attack in zip(strangers[35:], attacks, strict=True):
        stranger.sendall(attack)
    found: list[str] = []
    Prober(loop, KEY, {"here": [endpoint]}, lambda _host, _address, trouble: found.append(trouble))
    assert loop.run_until(lambda: bool(found), time.monotonic() + 20)
    assert found == [""]
    away = "probe of host here: turned a connection from 127.66.0.{} away: {}"
    wanted = {away.format(35, "it has not gone after 1 s")}
    wanted |= {away.format(number, "it does not speak this protocol") for number in range(36, 40)}
    assert loop.run_until(lambda: wanted <= set(told), time.monotonic() + 20), told
    assert any("127.0.0.66" in text for text in told)
    listener.close()
    loop.close()
    for number, stranger in enumerate(strangers):
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert len(stranger.recv(100)) == (32 if number > 35 else 0)
        stranger.close()
    assert not (tmp_path / "executed").exists()


def test_a_probe_that_was_turned_away_is_made_again() -> None:
    """As one is where a flood of strangers comes."""
    with socket.create_server(("127.0.0.3", 0)) as listener:
        target = Endpoint("lo", "127.0.0.3", listener.getsockname()[1])
        loop = Loop()
        found: list[str] = []
        prober = Prober(loop, KEY, {"busy": [target]}, lambda _host, _address, trouble: found.append(trouble))
        listener.setblocking(False)
        turned_away = 0
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            loop.step(time.monotonic() + 0.05)
            with contextlib.suppress(BlockingIOError):
                sock, _ = listener.accept()
                if turned_away == 3:
                    loop.run_until(lambda: False, time.monotonic() + 0.05)
                    sock.sendall(hmac.digest(KEY, sock.recv(32, socket.MSG_WAITALL) + b"busy", "sha256"))
                    loop.run_until(lambda: bool(found), deadline)
                turned_away += 1
                sock.close()
        prober.close()
        loop.close()
    assert (found, turned_away) == ([""], 4)


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
