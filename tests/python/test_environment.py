"""HOROVOD_* variables: read, checked, and named when they are wrong."""

import logging
import os
from pathlib import Path

import pytest

from horovod.common import environment
from horovod.common.environment import read_identity, read_network, read_tunables

JOB = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


def test_without_variables_it_is_a_job_of_one_with_the_documented_defaults() -> None:
    identity = read_identity({})
    assert (identity.rank, identity.size, identity.local_rank, identity.local_size) == (0, 1, 0, 1)
    assert (identity.cross_rank, identity.cross_size, identity.secret_key) == (0, 1, b"")
    tunables = read_tunables({})
    assert tunables.fusion_threshold == 134217728
    assert tunables.cache_capacity == 1024
    assert (tunables.stall_warning, tunables.stall_shutdown) == (60, 0)
    assert (tunables.heartbeat_timeout, tunables.start_timeout) == (30, 30)
    assert (tunables.log_level, tunables.log_hide_time) == (3, False)


def test_identity_is_read() -> None:
    identity = read_identity({**JOB, "HOROVOD_HOSTNAME": "a", "HOROVOD_JOB_ID": "j", "HOROVOD_SECRET_KEY": "k"})
    assert (identity.rank, identity.size, identity.host, identity.job_id) == (1, 2, "a", "j")
    assert identity.secret_key == b"k"
    assert "secret" not in repr(identity)


def test_cross_ranks_that_nobody_tells_are_left_to_the_meeting() -> None:
    hosts = {**JOB, "HOROVOD_SIZE": "4"}
    for variables, expected in (
        ({}, environment.UNTOLD),
        ({"HOROVOD_CROSS_SIZE": "2"}, (0, 2)),
        ({"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}, (1, 2)),
    ):
        identity = read_identity({**hosts, **variables})
        assert (identity.cross_rank, identity.cross_size) == expected
    with pytest.raises(ValueError, match="HOROVOD_CROSS_RANK=1 must be smaller than HOROVOD_CROSS_SIZE=1"):
        read_identity({**hosts, "HOROVOD_CROSS_RANK": "1"})
    with pytest.raises(ValueError, match="HOROVOD_CROSS_SIZE='0' can't be understood"):
        read_identity({**hosts, "HOROVOD_CROSS_SIZE": "0"})


@pytest.mark.parametrize("missing", JOB)
def test_half_an_identity_names_what_is_missing(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing} must be set too"):
        read_identity({name: value for name, value in JOB.items() if name != missing})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"HOROVOD_RANK": "2"}, "HOROVOD_RANK=2 must be smaller than HOROVOD_SIZE=2"),
        ({"HOROVOD_LOCAL_RANK": "5"}, "HOROVOD_LOCAL_RANK=5 must be smaller"),
        ({"HOROVOD_LOCAL_SIZE": "3"}, "HOROVOD_LOCAL_SIZE=3 can't be greater"),
        ({"HOROVOD_SIZE": "0"}, "HOROVOD_SIZE='0'"),
        ({"HOROVOD_RANK": "-1"}, "HOROVOD_RANK='-1'"),
        ({"HOROVOD_RANK": "one"}, "HOROVOD_RANK='one' can't be understood: expected an integer from 0"),
    ],
)
def test_a_contradiction_is_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_identity({**JOB, **changes})


TEXTS = environment.TEXT, environment.ANYTHING


@pytest.mark.parametrize("name", [n for n, (kind, _) in environment.VARIABLES.items() if kind not in TEXTS])
def test_every_variable_refuses_nonsense_and_ignores_the_empty_text(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='12 apples' can't be understood: expected "):
        environment.read(name, {name: "12 apples"})
    assert environment.read(name, {name: " "}) == environment.VARIABLES[name][1]


@pytest.mark.parametrize("name", ["HOROVOD_HOSTNAME", "HOROVOD_JOB_ID", "HOROVOD_GLOO_RENDEZVOUS_ADDR"])
def test_texts_are_utf_8(name: str) -> None:
    assert environment.read(name, {name: "hö"}) == "hö"
    with pytest.raises(ValueError, match=rf"^{name}='h.udcff' can't be understood: expected text in UTF-8\.$"):
        environment.read(name, {name: os.fsdecode(b"h\xff")})


def test_the_key_is_the_bytes_that_are_in_the_environment() -> None:
    for key in (b"\xff\xfe\x80", "hö".encode()):
        assert read_identity({"HOROVOD_SECRET_KEY": os.fsdecode(key)}).secret_key == key


@pytest.mark.parametrize("text", ["nan", "inf", "-1"])
def test_seconds_are_finite_and_not_negative(text: str) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        read_tunables({"HOROVOD_STALL_CHECK_TIME_SECONDS": text})


def test_the_allreduce_between_hosts_is_chosen_by_name() -> None:
    assert not read_tunables({}).allreduce_ring
    assert not read_tunables({"HOROVOD_ALLREDUCE": "hierarchical"}).allreduce_ring
    assert read_tunables({"HOROVOD_ALLREDUCE": "Ring"}).allreduce_ring
    with pytest.raises(
        ValueError, match="HOROVOD_ALLREDUCE='tree' can't be understood: expected one of hierarchical, ring"
    ):
        read_tunables({"HOROVOD_ALLREDUCE": "tree"})


def test_where_hosts_meet_is_read() -> None:
    network = read_network({})
    assert (network.address, network.port, network.interface) == ("", 0, None)
    assert not network.launcher_serves and not network.insecure
    network = read_network(
        {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "7",
            "HOROVOD_GLOO_IFACE": "eth0",
            "HOROVOD_RENDEZVOUS_SERVER": "launcher",
            "HOROVOD_INSECURE": "1",
        }
    )
    assert network == environment.Network("h", 7, "eth0", None, launcher_serves=True, insecure=True)


def test_log_levels_are_known_in_any_case() -> None:
    assert read_tunables({"HOROVOD_LOG_LEVEL": "Trace"}).log_level == 0
    with pytest.raises(ValueError, match="one of trace, debug, info, warning, error, fatal"):
        read_tunables({"HOROVOD_LOG_LEVEL": "loud"})


def test_stall_shutdown_below_the_warning_time_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod"):
        tunables = read_tunables({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"})
    assert tunables.stall_shutdown == 0
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=10 is ignored" in caplog.text
    assert read_tunables({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"}).stall_shutdown == 60


def test_the_stall_check_can_be_turned_off() -> None:
    tunables = read_tunables({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"})
    assert (tunables.stall_warning, tunables.stall_shutdown) == (0, 0)


def test_the_longer_start_timeout_counts() -> None:
    assert read_tunables({"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}).start_timeout == 5
    both = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5", "HOROVOD_START_TIMEOUT": "7"}
    assert read_tunables(both).start_timeout == 7


def test_a_missing_feature_that_was_asked_for_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "horovod"):
        read_tunables({"HOROVOD_TIMELINE": "x.json", "HOROVOD_AUTOTUNE": "0", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert "HOROVOD_TIMELINE" in caplog.text
    assert "HOROVOD_AUTOTUNE" not in caplog.text
    assert "HOROVOD_DYNAMIC_PROCESS_SETS" not in caplog.text  # sets can always be added


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("abc\n")
    path = str(tmp_path / "key")
    assert read_identity({"HOROVOD_SECRET_KEY_FILE": path, "HOROVOD_SECRET_KEY": "other"}).secret_key == b"abc"
    with pytest.raises(ValueError, match=r"HOROVOD_SECRET_KEY_FILE=.* can't be read"):
        read_identity({"HOROVOD_SECRET_KEY_FILE": path + ".not"})
