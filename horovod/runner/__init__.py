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
    job.py           starts the workers, watches them, ends them
    process_tree.py  finding, signalling and reaping every descendant of a process
    forwarding.py    lines of workers -> prefixed lines of the launcher
    sink.py          writing to a launcher stream that may be slow or gone
    check_build.py   --check-build and --version
"""
