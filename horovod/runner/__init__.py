"""The launcher: starts the ranks of a job, watches them and ends them.

`horovodrun` is `launch.run_commandline`. From the outside in:

    launch.py        the command: options -> checks -> job -> exit code
    options.py       every option
    tunables.py      the table of settings that are handed on: option, environment variable, configuration key
    config_file.py   the YAML file of --config-file
    hosts.py         which hosts, how many slots, who gets which rank
    environment.py   what a worker finds in its environment
    rendezvous.py    the server at which the hosts of a job meet
    supervisor.py    the process between the launcher and the workers, so that nothing outlives a launcher
    job.py           a job from its start to its end
    crew.py          what a job needs of those who start its workers:
    local_crew.py    on this machine
    cluster.py       on several: from the first ssh to the last agent's end
    host_agent.py    the launcher's side of an agent
    agent.py         the agent on a host
    agent_frames.py  what the two say to each other
    heartbeat.py     how each notices that the other is gone
    ssh.py           how an agent is started on another host, and what it means if that fails
    reachability.py  which addresses of a host can be reached from the others
    reach_map.py     which of them are used
    open_files.py    how many files a launcher may have open
    process_tree.py  finding, signalling and reaping every descendant of a process
    forwarding.py    lines of workers -> prefixed lines of the launcher
    sink.py          writing to a launcher stream that may be slow or gone
    check_build.py   --check-build and --version
    run_function.py  horovod.run
    run_job.py       its launcher
    run_task.py      its workers
"""

from horovod.runner.run_function import run

__all__ = ["run"]
