"""horovodrun with several hosts, all of which are this machine."""

import re

from launching import run, script

PLACE = script(
    "print(*[os.environ['HOROVOD_' + n] for n in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK',"
    " 'CROSS_SIZE', 'HOSTNAME')])"
)
RENDEZVOUS = script("print(*[os.environ.get(n) for n in sys.argv[1:]])")
NAMES = ["HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RENDEZVOUS_SERVER"]
ADD = script(
    """
    import horovod.numpy as hvd
    hvd.init()
    total = hvd.allreduce([float(hvd.rank())], op=hvd.Sum)[0]
    print(hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.is_homogeneous(), total)
    """
)


def lines(out: str) -> list[str]:
    return sorted(re.sub(r"^\[\d+\]<stdout>:", "", line) for line in out.splitlines())


def test_every_name_of_this_machine_is_a_host() -> None:
    code, out, _ = run("-np", "5", "-H", "localhost:2,127.0.0.2:1,127.0.0.3:4", *PLACE)
    assert code == 0
    assert lines(out) == [
        "0 5 0 2 0 3 localhost",
        "1 5 1 2 0 2 localhost",
        "2 5 0 1 1 3 127.0.0.2",
        "3 5 0 2 2 3 127.0.0.3",
        "4 5 1 2 1 2 127.0.0.3",
    ]


def test_workers_of_several_hosts_find_the_launcher_s_server_on_the_loopback() -> None:
    code, out, _ = run("-np", "2", "-H", "localhost:1,127.0.0.2:1", *RENDEZVOUS, *NAMES)
    assert code == 0
    first, second = lines(out)
    assert first == second
    assert re.fullmatch(r"127\.0\.0\.1 \d+ launcher", first)


def test_a_job_of_one_host_has_no_server_not_even_an_inherited_one() -> None:
    code, out, _ = run("-np", "1", *RENDEZVOUS, *NAMES, **dict.fromkeys(NAMES, "7"))
    assert (code, lines(out)) == (0, ["None None None"])


def test_ranks_of_several_hosts_meet_and_compute() -> None:
    for hosts, places in (
        ("localhost:2,127.0.0.2:2", ["0 0 0 True", "1 1 0 True", "2 0 1 True", "3 1 1 True"]),
        ("127.0.0.2:1,localhost:2,[::1]:1", ["0 0 0 False", "1 0 1 False", "2 1 0 False", "3 0 2 False"]),
    ):
        code, out, err = run("-np", "4", "-H", hosts, *ADD)
        assert code == 0, err
        assert lines(out) == [f"{place} 6.0" for place in places]


def test_a_host_that_dies_before_init_ends_the_job() -> None:
    worker = script("import horovod.numpy as hvd\nif rank == 2: os.kill(os.getpid(), 9)\nhvd.init()")
    code, _, err = run("-np", "4", "-H", "localhost:2,127.0.0.2:2", *worker)
    assert code == 137
    assert "the first process to fail was rank 2 of 4" in err
    assert "host:    127.0.0.2" in err


def test_a_rank_that_does_not_come_is_told_by_host() -> None:
    worker = script("import horovod.numpy as hvd\nif rank != 2: hvd.init()")
    code, _, err = run("-np", "3", "-H", "localhost:2,127.0.0.2:1", "--start-timeout", "2", *worker)
    assert code == 1
    assert "rank 2 of host 127.0.0.2 did not arrive within 2 s; arrived: rank 0-1 of host localhost" in err


def test_a_stranger_at_the_server_is_told_about() -> None:
    worker = script(
        """
        import socket
        if rank == 0:
            address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
            with socket.create_connection(address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\\r\\n" + b"x" * 100)
                stranger.settimeout(20)
                try:
                    assert not stranger.recv(100)
                except ConnectionResetError:
                    pass
        import horovod.numpy as hvd
        hvd.init()
        """
    )
    code, _, err = run("-np", "2", "-H", "localhost:1,127.0.0.2:1", *worker)
    assert code == 0, err
    assert "horovodrun: rendezvous: turned a connection from 127.0.0.1 away: it does not speak this protocol" in err


def test_inside_an_lsf_job_its_hosts_are_used() -> None:
    lsf = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "localhost 2 127.0.0.2 1"}
    code, out, err = run(*PLACE, **lsf)
    assert code == 0, err
    assert lines(out) == ["0 3 0 2 0 2 localhost", "1 3 1 2 0 1 localhost", "2 3 0 1 1 2 127.0.0.2"]
    code, out, _ = run("-np", "1", "-H", "127.0.0.3:1", *PLACE, **lsf)
    assert (code, lines(out)) == (0, ["0 1 0 1 0 1 127.0.0.3"])
    code, _, err = run("-np", "1", *PLACE, **{**lsf, "LSB_MCPU_HOSTS": "localhost"})
    assert code == 2
    assert "LSB_MCPU_HOSTS='localhost' can't be understood" in err
