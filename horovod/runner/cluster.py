"""A crew on several machines: one agent on each, reached by ssh.

States, each left when every agent has said what is awaited:

    greeting   ssh connects and the agents say who they are
    listening  they listen for each other             (one host skips these three)
    reaching   they try to reach each other
    serving    the one of rank 0's host serves the rendezvous
    starting   they start their workers
    running    until the end

Until all workers run, everything together has the start timeout. A host that can't be used is the end of the job; what
is wrong with the others is waited for for a moment, so that the user can repair all of it at once.
"""

from __future__ import annotations

import enum
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from horovod import __version__
from horovod.common.rendezvous.encoding import ProtocolError
from horovod.common.rendezvous.loop import Loop, Timer
from horovod.runner import process_tree
from horovod.runner.agent_frames import PAYLOAD_BYTES, Fields, Kind, decode_output, encode_frame, encode_output
from horovod.runner.crew import CrewEvents, Stream
from horovod.runner.environment import Credentials, place_variables, shared_variables, travelling
from horovod.runner.host_agent import HostAgent
from horovod.runner.hosts import Slot, host_names
from horovod.runner.reach_map import ReachMap
from horovod.runner.reachability import Endpoint
from horovod.runner.rendezvous import rendezvous_variables
from horovod.runner.run_task import DIFFERENT_MINORS, understand_each_other
from horovod.runner.ssh import SshOptions

# How long to wait for the troubles of other hosts after the first.
_TROUBLE_SECONDS = 3.0
# What an agent may take longer to end than it gives its workers.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class ClusterPlan:
    """What to start where."""

    command: Sequence[str]
    slots: Sequence[Slot]
    remote: Set[str]  # Those of its hosts that are not this machine.
    ssh: SshOptions
    exported: Mapping[str, str]
    interfaces: Sequence[str]  # To be used; all if none is named.
    start_seconds: float
    silence_seconds: float
    grace_seconds: float
    payload: bytes | None = None
    tell: Callable[[str], object] = lambda _text: None  # What is done, for --verbose.


class _State(enum.Enum):
    GREETING = "greeting"
    LISTENING = "listening"
    REACHING = "reaching"
    SERVING = "serving"
    STARTING = "starting"
    RUNNING = "running"


class ClusterCrew:
    """The agents of a job."""

    def __init__(self, loop: Loop, events: CrewEvents, plan: ClusterPlan) -> None:
        """Makes the agents; `start` starts them."""
        self._loop, self._events, self._plan = loop, events, plan
        self._credentials = Credentials()
        self._agents = [
            HostAgent(
                loop,
                self,
                host,
                [slot.rank for slot in plan.slots if slot.hostname == host],
                plan.ssh if host in plan.remote else None,
            )
            for host in host_names(plan.slots)
        ]
        self._state = _State.GREETING
        self._answered: set[str] = set()  # Hosts that have said what is awaited in this state.
        self._started: set[int] = set()
        self._endpoints: dict[str, list[Endpoint]] = {}
        self._reached = ReachMap({})
        self._chosen: dict[str, Endpoint] = {}
        self._variables: dict[str, str] = {}
        self._troubles: dict[str, str] = {}
        self._trouble_code = 1
        self._ending = False
        self._given_up = False
        self._paused: Set[Stream] = frozenset()
        self._timers: list[Timer] = []

    # ---- What the job wants -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all agents."""
        for agent in self._agents:
            try:
                agent.start()
            except OSError as error:
                self._note_trouble(agent, f"can't start ssh here: {error.strerror}", 1)
        self._after(self._plan.start_seconds, self._on_late)

    def forward(self, signum: int) -> None:
        """Sends a signal to the workers alone."""
        for agent in self._agents:
            agent.say(Kind.SIGNAL, signal=signum)

    def end(self, signum: int) -> None:
        """Has the agents end their workers and themselves."""
        if not self._ending:
            self._ending = True
            for timer in self._timers:
                timer.cancel()
            self._after(self._plan.grace_seconds + _END_SECONDS, self.kill)
        for agent in self._agents:
            if agent.greeted:
                agent.say(Kind.END, signal=signum)
            else:
                agent.hang_up()

    def kill(self) -> None:
        """Has the agents kill what is left, and after a moment gives up on those who do not."""
        for agent in self._agents:
            agent.say(Kind.KILL)
        self._after(_END_SECONDS, self._give_up_on_agents)

    def pause(self, streams: Set[Stream]) -> None:
        """Has the agents take no more output from these streams for now."""
        for stream in streams ^ self._paused:
            for agent in self._agents:
                agent.say(Kind.PAUSE, encode_output(0, stream, b"1" if stream in streams else b"0"))
        self._paused = frozenset(streams)

    def is_gone(self) -> bool:
        """Whether no agent is left, and nothing that leads to one."""
        return self._given_up or not process_tree.reap_orphans(own={agent.pid for agent in self._agents})

    def read_what_is_left(self) -> None:
        """Nothing: an agent has said everything when it is done."""

    # ---- What an agent tells ----------------------------------------------------------------------------------------

    def on_frame(self, agent: HostAgent, kind: Kind, body: bytes) -> None:
        """It says something."""
        if kind is Kind.OUTPUT:
            rank, stream, data = decode_output(body)
            self._events.on_output(self._own_rank(agent, rank), stream, data)
        elif kind is Kind.CLOSED:
            rank, stream, _ = decode_output(body)
            self._events.on_closed(self._own_rank(agent, rank), stream)
        else:
            self._on_fields(agent, kind, Fields(body))

    def _on_fields(self, agent: HostAgent, kind: Kind, fields: Fields) -> None:
        if kind is Kind.STARTED:
            rank = self._own_rank(agent, fields.get("rank", int))
            self._started.add(rank)
            self._events.on_started(rank, fields.get("pid", int))
            if self._started >= set(agent.ranks):
                self._answer(agent, _State.STARTING)
        elif kind is Kind.ENDED:
            self._events.on_ended(self._own_rank(agent, fields.get("rank", int)), fields.get("code", int))
        elif kind is Kind.WORD:
            self._events.on_word(fields.get("text", str))
        elif kind is Kind.TROUBLE:
            self._events.on_trouble(fields.get("text", str), fields.get("code", int))
        elif kind is Kind.REACHED:
            self._reached.note(
                agent.host, fields.get("host", str), fields.get("address", str), fields.get("trouble", str)
            )
            self._choose_addresses()
        elif self._ending:
            pass
        elif kind is Kind.HELLO:
            self._on_hello(agent, fields)
        elif kind is Kind.LISTENING and self._state is _State.LISTENING:
            rows = fields.rows("endpoints", str, str, int)
            self._endpoints[agent.host] = [Endpoint(*row) for row in rows]
            if not rows:
                self._note_trouble(agent, "it has no address by which other hosts could reach it.", 1)
            self._answer(agent, _State.LISTENING)
        elif kind is Kind.SERVING and self._state is _State.SERVING and agent is self._agents[0]:
            address = self._chosen[self._agents[0].host].address
            self._variables = rendezvous_variables(address, fields.get("port", int))
            self._start_workers()
        else:
            raise ProtocolError(f"it said {kind.name} while {self._state.value}")

    def on_lost(self, agent: HostAgent, reason: str) -> None:
        """It is gone before it was done."""
        if self._ending:
            return
        if self._state is _State.RUNNING:
            ranks = f"rank {agent.ranks[0]}" if len(agent.ranks) == 1 else f"ranks {agent.ranks[0]}-{agent.ranks[-1]}"
            self._events.on_trouble(f"lost host {agent.host} ({ranks}): {reason}", 1)
        else:
            self._note_trouble(agent, reason, 1)

    def _own_rank(self, agent: HostAgent, rank: int) -> int:
        if rank not in agent.ranks:
            raise ProtocolError(f"rank {rank} is not of host {agent.host}")
        return rank

    def _on_hello(self, agent: HostAgent, fields: Fields) -> None:
        version, python = fields.get("version", str), fields.get("python", str)
        interfaces = fields.texts("interfaces")
        if version != __version__:
            self._note_trouble(
                agent, f"it has Horovod {version}, this machine {__version__}. All hosts need the same version.", 1
            )
        elif self._plan.payload is not None and not understand_each_other(python, platform.python_version()):
            self._note_trouble(
                agent, f"it has Python {python}, this machine {platform.python_version()}: {DIFFERENT_MINORS}", 1
            )
        elif self._plan.interfaces and not set(self._plan.interfaces) & set(interfaces):
            self._note_trouble(
                agent,
                f"it has no network interface {' or '.join(self._plan.interfaces)} (there are: "
                f"{', '.join(interfaces)}).",
                2,
            )
        else:
            agent.listen_to_silence(self._plan.silence_seconds)
            self._plan.tell(f"Host {agent.host} is there: Python {python}, its own name is {fields.get('name', str)}.")
        self._answer(agent, _State.GREETING)

    # ---- From state to state ----------------------------------------------------------------------------------------

    def _answer(self, agent: HostAgent, state: _State) -> None:
        """An agent has said what is awaited in a state."""
        if self._ending or state is not self._state:
            return
        self._answered.add(agent.host)
        if len(self._answered | self._troubles.keys()) < len(self._agents):
            return
        if self._troubles:
            self._report_troubles()
        elif state is _State.GREETING and len(self._agents) > 1:
            self._plan.tell("SSH was successful into all the remote hosts.")
            self._plan.tell("Testing interfaces on all the hosts.")
            self._enter(_State.LISTENING)
            for each in self._agents:
                each.say(
                    Kind.PROBE,
                    host=each.host,
                    job_id=self._credentials.job_id,
                    secret_key=self._credentials.secret_key,
                    interfaces=list(self._plan.interfaces),
                )
        elif state is _State.GREETING:
            self._start_workers()
        elif state is _State.LISTENING:
            self._reach()
        elif state is _State.STARTING:
            self._enter(_State.RUNNING)
            for timer in self._timers:
                timer.cancel()

    def _enter(self, state: _State) -> None:
        self._state = state
        self._answered.clear()

    def _reach(self) -> None:
        self._enter(_State.REACHING)
        self._reached = ReachMap({agent.host: self._endpoints[agent.host] for agent in self._agents})
        for agent in self._agents:
            others = [
                [host, e.interface, e.address, e.port]
                for host, endpoints in self._endpoints.items()
                if host != agent.host
                for e in endpoints
            ]
            agent.say(Kind.REACH, endpoints=others)

    def _choose_addresses(self) -> None:
        if self._ending or self._state is not _State.REACHING:
            return
        chosen = self._reached.choose()
        if chosen is None:
            return
        if len(chosen) < len(self._agents):
            self._events.on_trouble(
                "not all hosts can reach each other, on ports that the system chooses:\n"
                f"{self._reached.report()}\n"
                "  Is there a firewall between them? --network-interfaces names the interfaces to use.",
                1,
            )
            return
        self._chosen = chosen
        self._plan.tell("Interfaces on all the hosts were successfully checked.")
        for host, endpoint in chosen.items():
            self._plan.tell(f"Host {host} is reached at {endpoint}.")
        self._enter(_State.SERVING)
        first = self._agents[0]
        host_of_rank = [slot.hostname for slot in self._plan.slots]
        first.say(Kind.SERVE, address=chosen[first.host].address, host_of_rank=host_of_rank)

    def _start_workers(self) -> None:
        self._enter(_State.STARTING)
        shared = {
            **travelling(os.environ),
            **shared_variables(self._plan.exported, self._credentials, self._variables),
        }
        payload = self._plan.payload or b""
        payload_frames = [
            encode_frame(Kind.PAYLOAD, payload[at : at + PAYLOAD_BYTES]) for at in range(0, len(payload), PAYLOAD_BYTES)
        ]
        for agent in self._agents:
            for frame in payload_frames:
                agent.send(frame)
            endpoint = self._chosen.get(agent.host)
            of_host = (
                {}
                if endpoint is None
                else {"HOROVOD_HOST_ADDRESS": endpoint.address, "HOROVOD_GLOO_IFACE": endpoint.interface}
            )
            agent.say(
                Kind.START,
                host=agent.host,
                directory=_working_directory(),
                command=list(self._plan.command),
                environment=shared,
                ranks=list(agent.ranks),
                own=[{**of_host, **place_variables(self._plan.slots[rank])} for rank in agent.ranks],
                grace=float(self._plan.grace_seconds),
                silence=float(self._plan.silence_seconds),
                has_payload=self._plan.payload is not None,
            )

    # ---- What goes wrong --------------------------------------------------------------------------------------------

    def _after(self, seconds: float, callback: Callable[[], object]) -> None:
        self._timers.append(self._loop.at(time.monotonic() + seconds, callback))

    def _note_trouble(self, agent: HostAgent, text: str, code: int) -> None:
        if not self._troubles:
            self._trouble_code = code
            self._after(_TROUBLE_SECONDS, self._report_troubles)
        self._troubles.setdefault(agent.host, text)
        if len(self._answered | self._troubles.keys()) == len(self._agents):
            self._report_troubles()

    def _on_late(self) -> None:
        for agent in self._agents:
            if agent.host not in self._answered:
                reason = agent.why_silent() if not agent.greeted else f"it stopped answering while {self._state.value}."
                late = f"nothing came within {self._plan.start_seconds:g} s (--start-timeout): {reason}"
                self._troubles.setdefault(agent.host, late)
        self._report_troubles()

    def _report_troubles(self) -> None:
        if self._ending:
            return
        count = len(self._troubles)
        hosts = f"{count} of {len(self._agents)} hosts" if len(self._agents) > 1 else "the host"
        lines = [f"{hosts} can't be used:"]
        lines += [f"  {host}: {text}" for host, text in self._troubles.items()]
        pending = [agent.host for agent in self._agents if agent.host not in self._answered | self._troubles.keys()]
        if pending:
            lines.append(f"  Not known yet: {', '.join(pending)}")
        self._events.on_trouble("\n".join(lines), self._trouble_code)

    def _give_up_on_agents(self) -> None:
        silent = [agent.host for agent in self._agents if agent.is_running()]
        if silent:
            self._events.on_word(
                f"no answer from the agents on {', '.join(silent)}: they end their workers when they notice that "
                "horovodrun is gone"
            )
        for agent in self._agents:
            agent.hang_up()
        self._given_up = bool(process_tree.kill_descendants())


def _working_directory() -> str:
    """The current directory as the user knows it: behind a symbolic link it may have other names on other hosts."""
    known = os.environ.get("PWD", "")
    try:
        return known if os.path.isabs(known) and os.path.samefile(known, ".") else os.getcwd()
    except OSError:
        return os.getcwd()
