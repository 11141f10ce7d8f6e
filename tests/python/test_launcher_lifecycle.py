"""horovodrun starts exactly np processes, watches them, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from launching import HOROVODRUN, Launcher, TerminalLauncher, run, script
from waiting import wait_until

# A worker's way to say that it is ready: a file with its rank. Tests then wait for all of them.
READY = "open(os.environ['READY'] + str(rank), 'w').close()\n"
STUBBORN = "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"


def wait_ready(folder: Path, count: int) -> None:
    wait_until(lambda: len(list(folder.glob("ready*"))) == count, f"{count} workers are ready")


def ready(folder: Path) -> dict[str, str]:
    return {"READY": str(folder / "ready")}


def test_exactly_np_processes_with_their_places() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "CONTROLLER")
    show = script(f"print(*[os.environ['HOROVOD_' + n] for n in {names}], os.environ['PYTHONUNBUFFERED'])")
    code, out, err = run("-np", "2", "-H", "localhost:4", *show)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0]<stdout>:0 2 0 2 0 1 localhost gloo 1",
        "[1]<stdout>:1 2 1 2 0 1 localhost gloo 1",
    ]


def test_workers_share_a_job_id_and_a_key_that_nobody_else_sees() -> None:
    show = script("""
        job, key = os.environ['HOROVOD_JOB_ID'], os.environ['HOROVOD_SECRET_KEY']
        int(job, 16), int(key, 16)
        seen = [p for p in os.listdir('/proc') if p.isdigit() and os.path.exists(f'/proc/{p}/cmdline')
                and key.encode() in open(f'/proc/{p}/cmdline', 'rb').read()]
        import hashlib
        print(len(job), len(key), seen, hashlib.sha256((job + key).encode()).hexdigest())
    """)
    lines = []
    for _ in range(2):
        code, out, err = run("-np", "2", "--verbose", *show)
        assert code == 0, err
        lines.append({line.partition(":")[2] for line in out.splitlines()})
        assert "SECRET" not in err
    assert all(len(of_a_job) == 1 and next(iter(of_a_job)).startswith("32 64 [] ") for of_a_job in lines)
    assert lines[0] != lines[1]


def test_the_command_runs_without_a_shell_and_without_input() -> None:
    show = script("print(sys.argv[1:], sys.stdin.read() == '')")
    code, out, _ = run("-np", "1", *show, "$HOME", "a b", "--verbose", "-np", "7")
    assert (code, out) == (0, "[0]<stdout>:['$HOME', 'a b', '--verbose', '-np', '7'] True\n")


def test_a_double_dash_may_stand_before_the_command() -> None:
    assert run("-np", "1", "--", "echo", "yes") == (0, "[0]<stdout>:yes\n", "")


def test_a_worker_that_ends_well_before_the_others_is_no_failure(tmp_path: Path) -> None:
    done = tmp_path / "done"
    worker = script(f"""
        if rank == 0: open({str(done)!r}, 'w').write(str(os.getpid()))
        else:
            while not os.path.exists({str(done)!r}) or os.path.exists('/proc/' + open({str(done)!r}).read()):
                time.sleep(0.01)
            print('went on')
    """)
    assert run("-np", "2", *worker) == (0, "[1]<stdout>:went on\n", "")


def test_the_first_failure_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    worker = script("""
        ready = os.environ['READY']
        open(ready + str(rank), 'w').close()
        if rank == 1:
            while not all(os.path.exists(ready + str(r)) for r in range(3)): time.sleep(0.01)
            for i in range(30): print('trouble', i, file=sys.stderr)
            sys.exit(7)
        time.sleep(60)
    """)
    code, _, err = run("-np", "3", *worker, **ready(tmp_path))
    assert code == 7
    lines = err.splitlines()
    assert "Process 1 exit with status code 7." in lines
    assert "Terminating remaining workers after failure of Process 1." in lines
    report = lines[lines.index("horovodrun: the first process to fail was rank 1 of 3: it ended with status code 7.") :]
    assert report[1] == "  host:    localhost"
    assert report[2].startswith("  pid:     ") and report[3].startswith("  command: ")
    assert report[-20:] == [f"    trouble {i}" for i in range(10, 30)]
    assert err.count("exit with status code") == 1


def test_a_failure_without_a_word_is_said_to_be_one() -> None:
    code, _, err = run("-np", "1", "false")
    assert code == 1
    assert err.splitlines()[-1] == "  It wrote nothing to stderr."
    assert "Terminating" not in err


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_worker_killed_by_a_signal(name: str) -> None:
    number = signal.Signals[name].value
    code, _, err = run("-np", "2", *script(f"rank == 1 and os.kill(os.getpid(), {number})\ntime.sleep(60)"))
    assert code == 128 + number
    assert f"Process 1 was killed by signal {name} ({number})." in err.splitlines()


@pytest.mark.parametrize("order", [[3, 0, 1, 2], [0, 3, 2, 1], [2, 1, 3, 0]])
def test_the_culprit_is_the_first_to_end_however_late_the_launcher_looks(order: list[int], tmp_path: Path) -> None:
    worker = script("""
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))
        open(os.environ['READY'] + f'{rank}.{os.getpid()}', 'w').close()
        time.sleep(60)
    """)
    with Launcher("-np", "4", *worker, **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 4)
        pids = {int(path.name[5]): int(path.suffix[1:]) for path in tmp_path.glob("ready*")}
        # A supervisor that is stopped learns of all four deaths at the same time.
        supervisor = launcher.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        for place, rank in enumerate(order):
            pidfd = os.pidfd_open(pids[rank])
            os.kill(pids[rank], signal.SIGUSR1 if place else signal.SIGKILL)
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
        os.kill(supervisor, signal.SIGCONT)
        code, _, err = launcher.finish()
    assert code == 137, err
    assert f"Process {order[0]} was killed by signal SIGKILL (9)." in err
    assert "exit with status" not in err


def test_termination_gives_a_worker_time_to_clean_up(tmp_path: Path) -> None:
    worker = script("""
        ready = os.environ['READY']
        if rank == 1:
            while not os.path.exists(ready): time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('tidied up'), os._exit(0)))
        open(ready, 'w').close()
        time.sleep(60)
    """)
    code, out, _ = run("-np", "2", *worker, **ready(tmp_path))
    assert (code, out) == (3, "[0]<stdout>:tidied up\n")


def test_a_worker_that_does_not_heed_termination_is_killed(tmp_path: Path) -> None:
    worker = script(
        STUBBORN
        + READY
        + """
while rank == 1 and not os.path.exists(os.environ['READY'] + '0'): time.sleep(0.01)
if rank == 1: sys.exit(3)
time.sleep(60)
"""
    )
    started = time.monotonic()
    code, _, _ = run("-np", "2", *worker, HOROVOD_GRACE_SECONDS="0.3", **ready(tmp_path))
    assert code == 3
    assert 0.3 < time.monotonic() - started < 20


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ending_signals_reach_the_workers_and_become_the_exit_code(signum: signal.Signals, tmp_path: Path) -> None:
    handler = f"signal.signal({signum.value}, lambda n, _: (print('got', n), os._exit(0)))\n"
    with Launcher("-np", "2", *script(handler + READY + "time.sleep(60)"), **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        launcher.process.send_signal(signum)
        code, out, err = launcher.finish()
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:got {signum.value}" for r in (0, 1)]
    assert "Process" not in err and f"{signum.name} ({signum.value}) received" in err


def test_a_signal_that_does_not_help_is_followed_by_a_kill(tmp_path: Path) -> None:
    worker = script(STUBBORN + READY + "time.sleep(60)")
    with Launcher("-np", "2", *worker, HOROVOD_GRACE_SECONDS="0.3", **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        launcher.process.terminate()
        assert launcher.finish()[0] == 143


def test_a_stopped_worker_is_killed_too(tmp_path: Path) -> None:
    worker = script(READY + "os.kill(os.getpid(), signal.SIGSTOP)")
    with Launcher("-np", "2", *worker, HOROVOD_GRACE_SECONDS="0.3", **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        launcher.process.terminate()
        assert launcher.finish()[0] == 143


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    worker = script(STUBBORN + READY + "time.sleep(60)")
    with Launcher("-np", "2", *worker, HOROVOD_GRACE_SECONDS="50", **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stderr is not None
        assert b"SIGINT (2) received" in launcher.process.stderr.readline()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.finish(20)[0] == 130


def test_user_signals_are_forwarded_and_the_job_goes_on(tmp_path: Path) -> None:
    worker = script(
        """
got = []
for s in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(s, lambda n, _: got.append(n))
"""
        + READY
        + "while len(got) < 2: time.sleep(0.01)\nprint(sorted(got))"
    )
    with Launcher("-np", "2", *worker, **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        launcher.process.send_signal(signal.SIGUSR1)
        launcher.process.send_signal(signal.SIGUSR2)
        code, out, err = launcher.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0]<stdout>:[10, 12]", "[1]<stdout>:[10, 12]"]


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    worker = script(READY + "while not os.path.exists(os.environ['READY'] + 'go'): time.sleep(0.01)")
    env = {**os.environ, **ready(tmp_path)}
    command = ["nohup", *HOROVODRUN, "-np", "1", *worker]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_ready(tmp_path, 1)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "readygo").touch()
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_ctrl_c_on_a_terminal_interrupts_every_worker_once(tmp_path: Path) -> None:
    worker = script(
        """
got = []
signal.signal(signal.SIGINT, lambda n, _: got.append(n))
"""
        + READY
        + """
while not got: time.sleep(0.01)
end = time.monotonic() + 0.3
while time.monotonic() < end: time.sleep(0.01)
print('interrupts:', len(got))
"""
    )
    with TerminalLauncher("-np", "2", *worker, **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        os.write(launcher.master, b"\x03")
        text = launcher.read_terminal()
        assert text.count("interrupts: 1") == 2, text
        assert launcher.process.returncode == 130
        assert launcher.living() == []


def test_an_interrupt_before_the_job_has_begun_ends_the_launcher_without_a_traceback(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    os.mkfifo(hosts)
    # The file is open once the launcher has opened it too; it gets nothing to read.
    with Launcher("-np", "1", "--hostfile", str(hosts), "true") as launcher, hosts.open("w"):
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.finish() == (-signal.SIGINT, "", "")


# A worker whose children are as hard to find as can be: one in the worker's group, one in a session of its own, and one
# that forked twice and so has no parent left. All ignore SIGTERM.
FAMILY = script(
    STUBBORN
    + """
def child(daemon, session):
    if os.fork() == 0:
        if session: os.setsid()
        if daemon and os.fork(): os._exit(0)
        open(os.environ['READY'] + f'{rank}.{daemon}{session}', 'w').close()
        time.sleep(100)
        os._exit(0)
child(False, False), child(False, True), child(True, True)
"""
    + READY
    + "while not os.path.exists(os.environ['READY'] + 'go'): time.sleep(0.01)\n"
)


@pytest.mark.parametrize("grace", ["0.3", "0"])
def test_nothing_is_left_when_the_launcher_is_killed(grace: str, tmp_path: Path) -> None:
    with Launcher("-np", "2", *FAMILY, HOROVOD_GRACE_SECONDS=grace, **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 8)
        wait_until(lambda: len(launcher.living()) == 2 + 8, "those that forked twice have ended between")
        launcher.process.kill()
        launcher.wait_until_nothing_is_left()


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with Launcher("-np", "2", *FAMILY, **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 8)
        os.kill(launcher.supervisor(), signal.SIGKILL)
        code, _, err = launcher.finish()
    assert code == 137
    assert "supervisor" in err and "SIGKILL (9)" in err


def test_the_workers_die_even_if_launcher_and_supervisor_are_killed_together(tmp_path: Path) -> None:
    with Launcher("-np", "2", *script(STUBBORN + READY + "time.sleep(100)"), **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 2)
        supervisor = launcher.supervisor()
        os.kill(launcher.pid, signal.SIGSTOP)  # So that it can't do anything about the other's death.
        os.kill(supervisor, signal.SIGKILL)
        launcher.process.kill()
        launcher.wait_until_nothing_is_left()


def test_what_workers_leave_behind_ends_with_the_job(tmp_path: Path) -> None:
    with Launcher("-np", "2", *FAMILY, HOROVOD_GRACE_SECONDS="0.3", **ready(tmp_path)) as launcher:
        wait_ready(tmp_path, 8)
        (tmp_path / "readygo").touch()
        assert launcher.finish() == (0, "", "")


@pytest.mark.parametrize("victim", ["", "supervisor"])
def test_what_the_shell_had_started_before_is_not_of_the_job(victim: str, tmp_path: Path) -> None:
    pid, supervisor = tmp_path / "pid", tmp_path / "supervisor"
    worker = f"echo $PPID > {supervisor}.new; mv {supervisor}.new {supervisor}; {'sleep 100' if victim else 'true'}"
    shell = f'sh -c "exec sleep 100" >/dev/null 2>&1 & echo $! > {pid}; exec "$@"'
    job = ["sh", "-c", shell, "sh", *HOROVODRUN, "-np", "1", "sh", "-c", worker]
    with subprocess.Popen(job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        if victim:
            wait_until(supervisor.exists, "the worker runs")
            os.kill(int(supervisor.read_text()), signal.SIGKILL)
        assert launcher.wait(20) == (137 if victim else 0)
    os.kill(int(pid.read_text()), signal.SIGKILL)  # It is there.


def test_output_may_go_to_a_program_that_the_shell_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = f'"$@" > >(sleep 0.2; cat > {log}.new; mv {log}.new {log}); true'
    subprocess.run(["bash", "-c", text, "bash", *HOROVODRUN, "-np", "1", "echo", "hello"], check=True)
    wait_until(log.exists, "the program has got all")
    assert log.read_text() == "[0]<stdout>:hello\n"


def test_a_low_limit_of_open_files_does_not_limit_the_job_and_stays_that_of_the_workers(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -Sn 40 && exec "$@"', "sh"]
    job = ["-np", "24", "--output-filename", str(tmp_path / "logs"), "sh", "-c", "ulimit -Sn"]
    done = subprocess.run([*limited, *HOROVODRUN, *job], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}]<stdout>:40" for rank in range(24))


def test_a_program_that_can_not_be_executed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no program at all")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    code, out, err = run("-np", "2", str(program))
    assert (code, out) == (2, "")
    assert err == f"horovodrun: can't start rank 0: {program}: Exec format error\n"
