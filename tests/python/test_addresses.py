"""Where rank 0's host is to be reached, if a launcher only says its name."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from launchers import start_all, torchrun
from machines import Machines, machines

from horovod.common.rendezvous.addresses import (
    for_others,
    listen_at_one_of,
    own_address_for_others,
    own_addresses,
    resolve,
)

HOSTS = ["h1", "h1", "h2", "h2"]
PLACES = [f"{rank} 4 {rank % 2} 2 {rank // 2} 2 6.0" for rank in range(4)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Machines whose own name leads to 127.0.1.1, as Debian sets them up."""
    with machines(2, tmp_path_factory.mktemp("machines"), two_networks=True) as made:
        for machine in made.all:
            names = made.folder / f"hosts of {machine.name}"
            own = f"{machine.address} {machine.name}\n"
            names.write_text((made.folder / "hosts").read_text().replace(own, f"127.0.1.1 {machine.name}\n"))
            machine.run(f"mount --bind '{names}' /etc/hosts && getent hosts {machine.name} | grep -q 127.0.1.1")
            machine.run("ip route add default dev eth0")
        yield made


def test_a_host_whose_own_name_is_a_loopback_address_there_is_reached_by_the_others(cluster: Machines) -> None:
    told = start_all(cluster, torchrun, HOSTS, HOROVOD_SECRET_KEY="s3cret")
    assert told == PLACES


def test_the_interface_can_be_chosen_where_no_way_leads_out(cluster: Machines) -> None:
    cluster["h1"].run("ip route del default")
    try:
        told = start_all(cluster, torchrun, HOSTS, HOROVOD_SECRET_KEY="s3cret", HOROVOD_GLOO_IFACE="eth0")
        wrong = start_all(cluster, torchrun, HOSTS, HOROVOD_SECRET_KEY="s3cret", HOROVOD_GLOO_IFACE="eth7")
    finally:
        cluster["h1"].run("ip route add default dev eth0")
    assert told == PLACES
    assert all("HOROVOD_GLOO_IFACE='eth7': there is no such interface here" in error for error in wrong)


def test_localhost_and_addresses_mean_what_they_say() -> None:
    here = [(socket.AF_INET, ("127.0.0.1", 7))]
    for host in ("localhost", "h1.localhost", "127.0.0.1"):
        assert for_others(host, here, None) == here
    elsewhere = [(socket.AF_INET, ("127.0.1.1", 7)), (socket.AF_INET, ("10.77.0.1", 7))]
    assert for_others("h1", elsewhere, None) == elsewhere
    others = for_others("h1", here, None)
    assert others == ([(socket.AF_INET, (own_addresses([])[0][1], 7))] if own_addresses([]) else here)


def test_the_next_address_is_taken_where_the_kernel_goes_without_a_family() -> None:
    unknown = (socket.AddressFamily(socket.AF_CAN), ("::1", 0))  # as IPv6 where the kernel has none
    here = (socket.AF_INET, ("127.0.0.1", 0))
    with listen_at_one_of([unknown, here]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="not supported"):
        listen_at_one_of([unknown])


@pytest.mark.parametrize("name", ["h1..h2", "x" * 64])
def test_what_can_not_be_a_name_is_unknown_as_others_are(name: str) -> None:
    with pytest.raises(OSError, match="it can't be the name of a host"):
        resolve(name, 7)


def test_an_address_that_only_a_name_has_is_not_taken_for_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "203.0.113.7")  # as in a cloud whose gateway has the address
    if own_addresses([]):
        assert own_address_for_others(None) == own_addresses([])[0][1]
    else:
        with pytest.raises(OSError, match="this host has no address for others"):
            own_address_for_others(None)
