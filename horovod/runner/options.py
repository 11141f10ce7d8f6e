"""Every option of horovodrun: the tunables, from their table, and those that the launcher itself acts on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from horovod.common.environment import VARIABLES
from horovod.runner.errors import UsageError
from horovod.runner.tunables import SECTIONS, TUNABLES, Tunable, tunable_variables


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


# Options of features that this version does not have: attribute, how the user knows it, what is missing.
UNAVAILABLE = (
    ("use_mpi", "--mpi", "starting by MPI"),
    ("use_jsrun", "--jsrun", "starting by jsrun"),
    ("mpi_args", "--mpi-args", "starting by MPI"),
    ("binding_args", "--binding-args", "starting by MPI"),
    ("host_discovery_script", "--host-discovery-script", "elastic training"),
    ("min_num_proc", "--min-np", "elastic training"),
    ("max_num_proc", "--max-np", "elastic training"),
    ("slots_per_host", "--slots-per-host", "elastic training"),
    ("elastic_timeout", "--elastic-timeout", "elastic training"),
    ("reset_limit", "--reset-limit", "elastic training"),
    ("cooldown_range", "--blacklist-cooldown-range", "elastic training"),
)


def check_available(args: argparse.Namespace) -> None:
    """Refuse options of features that this version does not have.

    Raises:
        UsageError: One was given.
    """
    for name, option, feature in UNAVAILABLE:
        value = getattr(args, name)
        if value is not None and value is not False:
            raise UsageError(f"{option}: {feature} is not available in this version")
    if args.encrypt and "HOROVOD_ENCRYPT" not in VARIABLES:
        raise UsageError("--encrypt: encryption is not available in this version")


def exported_variables(args: argparse.Namespace) -> dict[str, str]:
    """The variables that the given options set in every worker's environment."""
    exported = tunable_variables(args)
    if args.encrypt:
        exported["HOROVOD_ENCRYPT"] = "1"
    if args.start_timeout is not None:
        exported["HOROVOD_START_TIMEOUT"] = str(args.start_timeout)
    if args.tcp:
        exported["NCCL_IB_DISABLE"] = "1"
    if args.nics:
        exported["HOROVOD_GLOO_IFACE"] = args.nics[0]
        exported["NCCL_SOCKET_IFNAME"] = ",".join(args.nics)
    return exported


class _Parser(argparse.ArgumentParser):
    """An argparse parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see horovodrun --help)")


class _Deprecated(argparse._StoreConstAction):
    """An option that still works under its old name, with a word about the new one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        new = "--log-with-timestamp" if self.const else "--log-without-timestamp"
        print(f"horovodrun: {option_string} is deprecated: use {new}", file=sys.stderr)
        super().__call__(parser, namespace, values, option_string)


class _Interfaces(argparse.Action):
    """Network interfaces, comma-separated, each kept once, in their order."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        names = [name.strip() for name in str(values).split(",") if name.strip()]
        if option_string == "--network-interface" and len(names) > 1:
            print("horovodrun: --network-interface takes one name: use --network-interfaces", file=sys.stderr)
        namespace.nics = list(dict.fromkeys([*(namespace.nics or []), *names]))


def make_parser() -> argparse.ArgumentParser:
    """The parser of horovodrun's command line."""
    # Abbreviations would change their meaning with every new option.
    parser = _Parser(
        prog="horovodrun",
        usage="horovodrun -np N [options] COMMAND [ARG...]",
        description="Starts N processes of a distributed job and watches over them.",
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}

    def group(title: str) -> argparse._ArgumentGroup:
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        return groups[title]

    _add_general(parser)
    _add_hosts(group("hosts").add_mutually_exclusive_group().add_argument)
    _add_ssh(group("ssh").add_argument)
    for tunable in TUNABLES:
        _add_tunable(group(SECTIONS[tunable.section]), tunable)
    _add_elastic(group("elastic").add_argument)
    _add_library(group("library").add_argument)
    group("logging").add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="Put the time in front of every forwarded line.",
    )
    _add_controllers(group("controller").add_mutually_exclusive_group().add_argument)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="The program to start.")
    return parser


def _add_tunable(group: argparse._ArgumentGroup, tunable: Tunable) -> None:
    text = tunable.help + (" Not available in this version." if tunable.later else "")
    if tunable.type is not bool:
        group.add_argument(f"--{tunable.option}", type=tunable.type, help=text)
        return
    pair = group.add_mutually_exclusive_group()
    negative = "log-without-timestamp" if tunable.option == "log-with-timestamp" else f"no-{tunable.option}"
    name = tunable.name
    pair.add_argument(f"--{tunable.option}", dest=name, action="store_const", const=True, help=text)
    pair.add_argument(f"--{negative}", dest=name, action="store_const", const=False, help=f"Not --{tunable.option}.")
    if tunable.option == "log-with-timestamp":
        hidden = argparse.SUPPRESS
        pair.add_argument("--log-hide-timestamp", dest=name, action=_Deprecated, const=False, help=hidden)
        pair.add_argument("--no-log-hide-timestamp", dest=name, action=_Deprecated, const=True, help=hidden)


# The option declarations below read best as a table: one option, one line or two.
# fmt: off
def _add_general(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="Print the version and exit.")
    add("-np", "--num-proc", type=positive, metavar="N", help="Number of processes; in an LSF job all its slots.")
    add("-cb", "--check-build", action="store_true", help="Print what this installation can do and exit.")
    add("--disable-cache", action="store_true",
        help="Repeat all checks of hosts; they are always repeated.")
    add("--start-timeout", type=positive, metavar="S",
        help="Time limit for the start of all processes on other machines, and then for all to have called init "
             "(default: HOROVOD_START_TIMEOUT, or 30).")
    add("--network-interfaces", dest="nics", action=_Interfaces, metavar="NAMES",
        help="Network interfaces to use, comma-separated; may be repeated.")
    add("--network-interface", dest="nics", action=_Interfaces, metavar="NAME",
        help="One network interface to use; may be repeated.")
    add("--output-filename", metavar="PATH",
        help="Also write the output of rank N to PATH/rank.N/stdout and PATH/rank.N/stderr.")
    add("--verbose", action="store_true", help="Tell what the launcher does.")
    add("--config-file", metavar="PATH", help="YAML file with settings; an option on the command line wins over it.")


def _add_hosts(add: Callable[..., Any]) -> None:
    add("-H", "--hosts", metavar="HOSTS",
        help="Hosts and their slots, such as h1:4,h2:4 (default: localhost:<np>). Other machines are reached by ssh; "
             "each name of this one, such as 127.0.0.2, counts as a host.")
    add("-hostfile", "--hostfile", metavar="PATH", help="File with lines '<host> slots=<n>'.")
    add("--host-discovery-script", metavar="PATH", help="Not available in this version.")


def _add_ssh(add: Callable[..., Any]) -> None:
    add("-p", "--ssh-port", type=positive, metavar="PORT", help="Port of ssh on all other hosts.")
    add("-i", "--ssh-identity-file", metavar="PATH", help="Private key for ssh to other hosts.")


def _add_elastic(add: Callable[..., Any]) -> None:
    later = "Not available in this version."
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=positive, metavar="N", help=later)
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=positive, metavar="N", help=later)
    add("--slots-per-host", type=positive, metavar="N", help=later)
    add("--elastic-timeout", type=positive, metavar="S", help=later)
    add("--reset-limit", type=positive, metavar="N", help=later)
    add("--blacklist-cooldown-range", dest="cooldown_range", type=int, nargs=2, metavar=("MIN", "MAX"), help=later)


def _add_library(add: Callable[..., Any]) -> None:
    add("--mpi-args", metavar="TEXT", help="Not available in this version.")
    add("--encrypt", action="store_true", help="Encrypt what ranks of different hosts send each other.")
    add("--tcp", action="store_true", help="Between hosts use TCP only; sets NCCL_IB_DISABLE=1.")
    add("--binding-args", metavar="TEXT", help="Not available in this version.")


def _add_controllers(add: Callable[..., Any]) -> None:
    add("--gloo", dest="use_gloo", action="store_true",
        help="Use the built-in engine, which takes Gloo's place (the default).")
    add("--mpi", dest="use_mpi", action="store_true", help="Not available in this version.")
    add("--jsrun", dest="use_jsrun", action="store_true", help="Not available in this version.")
# fmt: on
