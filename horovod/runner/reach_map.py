"""Who has reached whom, and at which address each host is to be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from horovod.runner.reachability import Endpoint

_SHOWN = 8


class ReachMap:
    """What the hosts have found out about each other's addresses."""

    def __init__(self, endpoints: Mapping[str, Sequence[Endpoint]]) -> None:
        """`endpoints`: where each host listens, those to be preferred first."""
        self._endpoints = endpoints
        self._hosts = list(endpoints)
        # (host, address) -> who tried -> why it failed; nothing if it did not.
        self._found: dict[tuple[str, str], dict[str, str]] = {
            (host, endpoint.address): {} for host, each in endpoints.items() for endpoint in each
        }

    def note(self, by: str, host: str, address: str, trouble: str) -> None:
        """A host has reached another at an address, or not."""
        if (host, address) in self._found and by in self._endpoints:
            self._found[host, address][by] = trouble

    def choose(self) -> dict[str, Endpoint] | None:
        """The first address of each host at which all others reach it.

        Returns:
            Addresses by host, without those hosts that have none; None if that is not known yet, or not all about
            those that have none.
        """
        others = len(self._hosts) - 1
        chosen: dict[str, Endpoint] = {}
        for host in self._hosts:
            found = [(endpoint, self._found[host, endpoint.address]) for endpoint in self._endpoints[host]]
            # The first that nobody has failed to reach so far.
            best = next(((endpoint, tried) for endpoint, tried in found if not any(tried.values())), None)
            if best is not None and len(best[1]) == others:
                chosen[host] = best[0]
            elif best is not None or any(len(tried) < others for _, tried in found):
                return None
        return chosen

    def report(self) -> str:
        """Which hosts could not be reached, by whom, at which address, and why."""
        lines = []
        for host in self._hosts:
            if self._is_reached(host):
                continue
            lines.append(f"  {host} can't be reached by all others:")
            for endpoint in self._endpoints[host]:
                by_reason: dict[str, list[str]] = {}
                found = self._found[host, endpoint.address]
                for by in self._hosts:  # in the order of the job's hosts, whoever came first
                    if trouble := found.get(by, ""):
                        by_reason.setdefault(trouble, []).append(by)
                for trouble, all_by in by_reason.items():
                    more = f" and {len(all_by) - _SHOWN} more" if len(all_by) > _SHOWN else ""
                    lines.append(f"    at {endpoint} from {', '.join(all_by[:_SHOWN])}{more}: {trouble}")
        return "\n".join(lines)

    def _is_reached(self, host: str) -> bool:
        return any(
            len(found := self._found[host, endpoint.address]) == len(self._hosts) - 1 and not any(found.values())
            for endpoint in self._endpoints[host]
        )
