"""Options, the configuration file, hosts: what is accepted, what it does, and how mistakes are told."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from launching import HOROVODRUN, run, script

from horovod.runner.errors import UsageError
from horovod.runner.hosts import Host, Slot, assign_slots, is_local, parse_hostfile, parse_hosts
from horovod.runner.launch import parse_args
from horovod.runner.options import exported_variables

# Option, key of the configuration file and its value, variable and its value.
TUNABLES = [
    ("--fusion-threshold-mb 2", "params.fusion_threshold_mb: 2", "HOROVOD_FUSION_THRESHOLD=2097152"),
    ("--fusion-threshold-mb 0", "params.fusion_threshold_mb: 0", "HOROVOD_FUSION_THRESHOLD=0"),
    ("--cycle-time-ms 2.5", "params.cycle_time_ms: 2.5", "HOROVOD_CYCLE_TIME=2.5"),
    ("--cache-capacity 7", "params.cache_capacity: 7", "HOROVOD_CACHE_CAPACITY=7"),
    ("--hierarchical-allreduce", "params.hierarchical_allreduce: true", "HOROVOD_HIERARCHICAL_ALLREDUCE=1"),
    ("--no-hierarchical-allreduce", "params.hierarchical_allreduce: false", "HOROVOD_HIERARCHICAL_ALLREDUCE=0"),
    ("--hierarchical-allgather", "params.hierarchical_allgather: true", "HOROVOD_HIERARCHICAL_ALLGATHER=1"),
    ("--no-hierarchical-allgather", "params.hierarchical_allgather: false", "HOROVOD_HIERARCHICAL_ALLGATHER=0"),
    ("--torus-allreduce", "params.torus_allreduce: true", "HOROVOD_TORUS_ALLREDUCE=1"),
    ("--no-torus-allreduce", "params.torus_allreduce: false", "HOROVOD_TORUS_ALLREDUCE=0"),
    ("--no-stall-check", "stall_check.enabled: false", "HOROVOD_STALL_CHECK_DISABLE=1"),
    ("--stall-check", "stall_check.enabled: true", "HOROVOD_STALL_CHECK_DISABLE=0"),
    ("--stall-check-warning-time-seconds 5",
     "stall_check.warning_time_seconds: 5", "HOROVOD_STALL_CHECK_TIME_SECONDS=5"),
    ("--stall-check-shutdown-time-seconds 9",
     "stall_check.shutdown_time_seconds: 9", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=9"),
    ("--mpi-threads-disable", "library_options.mpi_threads_disable: true", "HOROVOD_MPI_THREADS_DISABLE=1"),
    ("--no-mpi-threads-disable", "library_options.mpi_threads_disable: false", "HOROVOD_MPI_THREADS_DISABLE=0"),
    ("--num-nccl-streams 2", "library_options.num_nccl_streams: 2", "HOROVOD_NUM_NCCL_STREAMS=2"),
    ("--thread-affinity 1", "library_options.thread_affinity: 1", "HOROVOD_THREAD_AFFINITY=1"),
    ("--thread-affinity 0,1", "library_options.thread_affinity: '0,1'", "HOROVOD_THREAD_AFFINITY=0,1"),
    ("--gloo-timeout-seconds 4", "library_options.gloo_timeout_seconds: 4", "HOROVOD_GLOO_TIMEOUT_SECONDS=4"),
    ("--log-level DEBUG", "logging.level: debug", "HOROVOD_LOG_LEVEL=DEBUG"),
    ("--log-with-timestamp", "logging.with_timestamp: true", "HOROVOD_LOG_HIDE_TIME=0"),
    ("--log-without-timestamp", "logging.with_timestamp: false", "HOROVOD_LOG_HIDE_TIME=1"),
]  # fmt: skip


def config(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def nested(key_and_value: str) -> str:
    section, _, rest = key_and_value.partition(".")
    return f"{section}:\n  {rest}\n"


def exported(*arguments: str) -> list[str]:
    return [f"{k}={v}" for k, v in exported_variables(parse_args(["-np", "1", *arguments, "true"])).items()]


@pytest.mark.parametrize(("option", "key", "variable"), TUNABLES)
def test_a_tunable_is_an_option_and_a_key_and_becomes_a_variable(
    option: str, key: str, variable: str, tmp_path: Path
) -> None:
    assert exported(*option.split()) == [variable]
    assert exported("--config-file", config(tmp_path, nested(key))) == [variable]


def test_nothing_is_exported_that_was_not_given() -> None:
    assert exported() == []


def test_the_command_line_wins_over_the_file_wherever_it_stands(tmp_path: Path) -> None:
    path = config(tmp_path, "params: {cache_capacity: 5, cycle_time_ms: 3}\nstall_check: {enabled: true}\n")
    expected = ["HOROVOD_CACHE_CAPACITY=0", "HOROVOD_CYCLE_TIME=3.0", "HOROVOD_STALL_CHECK_DISABLE=1"]
    options = ["--cache-capacity", "0", "--no-stall-check"]
    assert sorted(exported("--config-file", path, *options)) == expected
    assert sorted(exported(*options, "--config-file", path)) == expected


def test_an_empty_file_and_null_are_no_settings(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "params:\n", "params: {cache_capacity: null}\ncontroller: null\n"):
        assert exported("--config-file", config(tmp_path, text)) == []


def test_switched_off_features_may_be_named(tmp_path: Path) -> None:
    text = "controller: Gloo\nautotune: {enabled: false, warmup_samples: 3}\ntimeline: {mark_cycles: false}\n"
    assert exported("--config-file", config(tmp_path, text), "--no-autotune") == []
    text = "autotune: {enabled: true, log_file: f, warmup_samples: 3}\n"
    assert exported("--config-file", config(tmp_path, text), "--no-autotune") == []


def test_variables_reach_the_workers_and_the_rest_of_the_environment_stays() -> None:
    show = script("print(*[os.environ[n] for n in sys.argv[1:]])")
    names = ["HOROVOD_CACHE_CAPACITY", "HOROVOD_START_TIMEOUT", "NCCL_IB_DISABLE", "HOROVOD_GLOO_IFACE", "OTHER"]
    options = ["--cache-capacity", "3", "--start-timeout", "9", "--tcp", "--network-interfaces", "lo"]
    code, out, err = run("-np", "1", "--verbose", *options, *show, *names, HOROVOD_CACHE_CAPACITY="8", OTHER="kept")
    assert (code, out) == (0, "[0]<stdout>:3 9 1 lo kept\n")
    assert "Filtering local host names." in err and "Setting HOROVOD_CACHE_CAPACITY=3." in err


@pytest.mark.parametrize(
    "options",
    [
        "--gloo", "--disable-cache", "-p 22", "--ssh-port 22", "-i key", "--ssh-identity-file key", "--tcp",
        "--network-interface lo", "--num-proc 2", "-H localhost:2", "--hosts localhost", "-H 127.0.0.1:2",
        "-H [::1]:2", "--start-timeout 5", "--verbose", "--log-hide-timestamp", "--no-log-hide-timestamp",
    ],
)  # fmt: skip
def test_options_that_need_nothing_more_on_one_host_are_accepted(options: str) -> None:
    parse_args(["-np", "1", *options.split(), "true"])


@pytest.mark.parametrize(
    "options",
    [
        "--autotune", "--autotune-log-file f", "--autotune-warmup-samples 1", "--autotune-steps-per-sample 1",
        "--autotune-bayes-opt-max-samples 1", "--autotune-gaussian-process-noise 0.5", "--timeline-filename f",
        "--timeline-mark-cycles", "--min-np 1", "--min-num-proc 1", "--max-np 2", "--max-num-proc 2",
        "--slots-per-host 1", "--elastic-timeout 1", "--reset-limit 1", "--blacklist-cooldown-range 1 2",
        "--host-discovery-script f", "--mpi", "--jsrun", "--mpi-args=-x", "--binding-args=-x",
    ],
)  # fmt: skip
def test_options_of_missing_features_say_so(options: str) -> None:
    option = re.split("[ =]", options)[0].replace("-num-proc", "-np")
    with pytest.raises(UsageError, match=rf"^{option}: .* is not available in this version$"):
        parse_args(["-np", "1", *options.split(), "true"])


BAD_INPUT = [
    ("", "-np"),
    ("-np 2", "command"),
    ("true", "-np"),
    ("-np 0 true", "at least 1, not 0"),
    ("-np -3 true", "at least 1, not -3"),
    ("-np two true", "two"),
    ("-np 2 --no-such-option true", "--no-such-option"),
    ("-np 2 --verb true", "--verb"),
    ("-np 2 no-such-program-anywhere", "no-such-program-anywhere"),
    ("-np 2 /etc/passwd", "/etc/passwd"),
    ("-np 3 -H localhost:2 true", "3 slots, but there are 2"),
    ("-np 2 -H localhost true", "2 slots, but there are 1"),
    ("-np 1 -H localhost:0 true", "no slots"),
    ("-np 1 -H localhost:x true", "localhost:x"),
    ("-np 1 -H ::1:2 true", "[address]:slots"),
    ("-np 1 -H [zz]:2 true", "[zz]"),
    ("-np 2 -H localhost:1,192.0.2.1:1 -i no-such-key true", "-i: can't read no-such-key"),
    ("-np 1 -H localhost --hostfile f true", "not allowed with"),
    ("-np 1 --hostfile no-such-file true", "no-such-file: No such file"),
    ("-np 1 --config-file no-such-file true", "no-such-file: No such file"),
    ("-np 1 --config-file / true", "Is a directory"),
    ("-np 1 --gloo --mpi true", "not allowed with"),
    ("-np 1 --mpi true", "not available in this version"),
    ("-np 1 --autotune true", "not available in this version"),
    ("-np 1 --cache-capacity -1 true", "cache_capacity=-1 must be >= 0"),
    ("-np 1 --cycle-time-ms nan true", "cycle_time_ms=nan must be >= 0"),
    ("-np 1 --log-level LOUD true", "LOUD"),
    ("-np 1 --network-interfaces nic9 true", "nic9"),
    ("-np 1 --output-filename /dev/null/x true", "/dev/null/x"),
    ("-np 1 --stall-check --no-stall-check true", "not allowed with"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT)
def test_bad_input_gives_one_line_and_exit_code_2(arguments: str, words: str) -> None:
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"horovodrun: .*\n", err) and words in err


def test_a_directory_that_is_no_more_is_told_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    leave = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh"]
    job = [*leave, *HOROVODRUN, "-np", "1", "-H", "192.0.2.1", "true"]
    done = subprocess.run(job, cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    told = "horovodrun: the current directory, which the workers are to have too: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parms: {cache_capacity: 1}", "unknown section 'parms'"),
        ("params: {cache_capcity: 1}", "unknown key 'cache_capcity' in section params"),
        ("logging: {hide_timestamp: true}", "unknown key 'hide_timestamp'"),
        ("params: {cache_capacity: many}", "params.cache_capacity must be a whole number, not 'many'"),
        ("params: {cache_capacity: 1.5}", "whole number"),
        ("params: {cache_capacity: true}", "whole number"),
        ("params: {cache_capacity: -1}", "must be >= 0"),
        ("params: {torus_allreduce: 1}", "true or false"),
        ("params: {cycle_time_ms: fast}", "a number"),
        ("logging: {level: LOUD}", "logging.level: must be one of"),
        ("library_options: {thread_affinity: x}", "thread_affinity"),
        ("params: 3", "section params"),
        ("just text", "expected sections"),
        ("params: [", "is not YAML"),
        ("params: {cycle_time_ms: 2001-06-31}", "is not YAML: day is out of range"),
        ("params: {cycle_time_ms: !!bool maybe}", "is not YAML"),
        ("params: " + 1000 * "[", "is not YAML"),
        ("params: {cycle_time_ms: 1" + 400 * "0" + "}", "params.cycle_time_ms: "),
        ("controller: carrier-pigeon", "No such controller supported: carrier-pigeon"),
        ("controller: mpi", "--mpi: starting by MPI is not available"),
        ("autotune: {enabled: true}", "autotuning is not available"),
        ("autotune: {log_file: f}", "autotuning is not available"),
        ("timeline: {filename: f}", "the timeline is not available"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_mistakes_in_the_file(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        parse_args(["-np", "1", "--config-file", config(tmp_path, text), "true"])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_mistake_in_the_file_ends_the_launcher_with_one_line(tmp_path: Path) -> None:
    code, out, err = run("-np", "1", "--config-file", config(tmp_path, "params: [\n"), "true")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"horovodrun: .* is not YAML: .*\n", err)


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    for option in ("--config-file", "--hostfile"):
        code, _, err = run("-np", "1", option, str(path), "true")
        assert code == 2 and err.startswith(f"horovodrun: {option}: ") and err.count("\n") == 1


def test_version_and_check_build_need_no_np() -> None:
    code, out, err = run("--version")
    assert (code, err) == (0, "") and re.fullmatch(r"\d+\.\d+.*\n", out)
    for option in ("-cb", "--check-build"):
        code, report, err = run(option)
        assert (code, err) == (0, "")
        assert report.startswith(f"Horovod v{out.strip()}:\n\nAvailable Frameworks:\n")
        for title in ("Available Controllers:", "Available Tensor Operations:"):
            assert f"\n{title}\n" in report
        for name, package in (("PyTorch", "torch"), ("TensorFlow", "tensorflow")):
            mark = "X" if importlib.util.find_spec(package) else " "
            assert f"    [{mark}] {name}\n" in report
        for name in ("MXNet", "MPI", "Gloo", "NCCL", "DDL", "CCL"):
            assert f"    [ ] {name}\n" in report + "\n"
        assert re.search(r"\[[X ]\] NumPy\n", report) and re.search(r"\[[X ]\] Native\n", report)


def test_hosts_text() -> None:
    assert parse_hosts("a:2, b-1.c:10,d,[fe80::1]:3,[::1]") == [
        Host("a", 2),
        Host("b-1.c", 10),
        Host("d", 1),
        Host("fe80::1", 3),
        Host("::1", 1),
    ]
    assert parse_hosts("a:2,b:1,a:3") == [Host("a", 5), Host("b", 1)]
    with pytest.raises(UsageError, match="expected host:slots"):
        parse_hosts("a:" + 5000 * "9")  # more digits than Python makes a number of


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\nh1 slots=2\n\n  h2   slots = 4  # big\n[::1] slots=1\nh3\n")
    expected = [Host("h1", 2), Host("h2", 4), Host("::1", 1), Host("h3", 1)]
    assert parse_hostfile(str(path)) == expected
    path.write_text(
        "\ufeffh1 slots=2\r\n\r\nh2 slots=4\r\n[::1]\r\nh3\r\n", newline=""
    )  # as editors of Windows write it
    assert parse_hostfile(str(path)) == expected
    for text, words in [("h1 slot=2\n", "line 1"), ("# none\n", "names no host"), ("a\nb slots=0\n", "line 2")]:
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            parse_hostfile(str(path))


def test_ranks_go_host_by_host_and_cross_ranks_count_hosts_with_that_local_rank() -> None:
    def place(slot: Slot) -> tuple[object, ...]:
        return (slot.hostname, slot.rank, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)

    assert [place(slot) for slot in assign_slots([Host("a", 1), Host("b", 3), Host("c", 9), Host("d", 1)], 6)] == [
        ("a", 0, 0, 1, 0, 3),
        ("b", 1, 0, 3, 1, 3),
        ("b", 2, 1, 3, 0, 2),
        ("b", 3, 2, 3, 0, 1),
        ("c", 4, 0, 2, 2, 3),
        ("c", 5, 1, 2, 1, 2),
    ]


def test_this_machine_under_all_its_names() -> None:
    addresses = ["127.0.0.1", "127.0.0.2", "localhost", "LOCALHOST", "::1", socket.gethostname()]
    held = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses += [entry.address for entry in held if entry.family in (socket.AF_INET, socket.AF_INET6)]
    for name in addresses:
        assert is_local(name), name
    assert not is_local("192.0.2.1")
    assert not is_local("0.0.0.0")


def test_more_slots_than_np_give_np_workers(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=8\n")
    assert len(assign_slots(parse_hostfile(str(path)), 3)) == 3
    code, out, _ = run("-np", "3", "-hostfile", str(path), "echo", "x")
    assert code == 0 and len(out.splitlines()) == 3


def test_encryption_is_asked_for() -> None:
    assert exported("--encrypt") == ["HOROVOD_ENCRYPT=1"]
