"""How an agent is started on another host, and what it means if that fails.

The user's own ssh configuration decides about users, keys, jump hosts and host keys. Nothing secret is on the command
line, which everyone on both machines can read.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from horovod import __version__

AGENT = ("-P", "-m", "horovod.runner.agent")  # -P: not what happens to lie in the home directory.
_SSH_FAILED = 255
_SHOWN_LINES = 6

# Never ask, since nobody could answer; take part in an existing shared connection, but leave none behind; and whatever
# the user's configuration says for a terminal session is not for this one.
_OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    "ForwardX11=no",
)


@dataclass(frozen=True)
class SshOptions:
    """What horovodrun was told about ssh."""

    port: int | None = None
    identity_file: str | None = None
    connect_seconds: int = 30

    def words(self) -> list[str]:
        """The options that a user would give to ssh for the same."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return port + ([] if self.identity_file is None else ["-i", self.identity_file])

    def test_command(self, host: str) -> str:
        """What to try by hand."""
        return shlex.join(["ssh", *self.words(), host, "true"])


def find_ssh() -> str | None:
    """The ssh program, if this machine has one."""
    return shutil.which("ssh")


def local_agent_command() -> list[str]:
    """Starts the agent on this machine."""
    return [sys.executable, *AGENT]


def remote_agent_command(host: str, options: SshOptions) -> list[str]:
    """Starts the agent on another host, by the Python at the same path as this one."""
    settings = [*_OPTIONS, f"ConnectTimeout={options.connect_seconds}"]
    return [
        find_ssh() or "ssh",
        *(word for setting in settings for word in ("-o", setting)),
        *options.words(),
        "--",
        host,
        shlex.join([sys.executable, *AGENT]),
    ]


# What is said -> what it means, and what to do. {host}, {test}, {python} and {version} are filled in.
_SAID_BY_SSH = (
    (
        ("Could not resolve hostname",),
        "its name is not known. Is it spelt right, and in DNS, /etc/hosts or ~/.ssh/config?",
    ),
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        "its host key is not the one that ssh knows, or ssh knows none. Connect once by hand and check it: ssh {host}",
    ),
    (
        ("Permission denied", "Too many authentication failures", "no mutual signature algorithm"),
        "ssh was not let in: it needs a key that works without a password. Try: {test}; -i names a key.",
    ),
    (
        ("Connection refused",),
        "nobody listens for ssh there. Does sshd run, at this port (-p)?",
    ),
    (
        ("timed out", "No route to host", "Network is unreachable"),
        "it can't be reached by ssh. Is it up, and does no firewall stand between? Try: {test}",
    ),
)
_SAID_BY_PYTHON = (
    (
        ("No module named 'horovod'", "No module named horovod", "No module named 'psutil'"),
        "Horovod is not installed for {python} there. Install the version of this machine: "
        "{python} -m pip install horovod=={version}",
    ),
    (
        ("No module named",),
        "the Horovod of {python} there is not the version of this machine, {version}: install the same one.",
    ),
    (
        ("Unknown option: -P", "unknown option -P"),
        "its {python} is older than 3.11, which Horovod needs.",
    ),
)
_SAID_BY_SHELL = {  # By exit code.
    126: "{python}, the Python that runs horovodrun here, can't be run there. All hosts need Python and Horovod at the "
    "same path, and the user that ssh logs in as must be allowed to use them.",
    127: "there is no {python}, the Python that runs horovodrun here. All hosts need Python and Horovod at the same "
    "path.",
}


def explain(host: str, options: SshOptions, code: int | None, stderr: str, noise: str) -> str:
    """Why there is no agent on a host.

    Args:
        host: The host.
        options: Those of ssh.
        code: The exit code of ssh; None while it runs.
        stderr: What it wrote there, or the remote shell did.
        noise: What came instead of the agent's first words.

    Returns:
        One line with the reason and what to do, and lines with what was heard.
    """
    words = {"host": host, "test": options.test_command(host), "python": sys.executable, "version": __version__}
    meaning = None if code is None else _SAID_BY_SHELL.get(code)
    if meaning is None:
        # The words of ssh count only if it is ssh that failed: a banner may have "timed out" in it as well.
        known = [*(_SAID_BY_SSH if code in (None, _SSH_FAILED) else ()), *_SAID_BY_PYTHON]
        meaning = next((text for signs, text in known if any(sign in stderr for sign in signs)), None)
    if meaning is None and code == _SSH_FAILED:
        meaning = "ssh failed. Try: {test}"
    if meaning is None:
        meaning = "the agent there ended at once, with exit code " + str(code) + ". Try: {test}"
    heard = _last_lines(stderr) or _last_lines(noise)
    return "\n".join([meaning.format(**words), *(f"    {line}" for line in heard)])


def _last_lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]
