"""Telling who was turned away: enough to find them, not so much that a port scanner fills the log."""

from collections.abc import Callable, Container

# Of each address these are told, and after them only the 100th, the 1,000th and so on.
TOLD_EACH = 10
# The addresses that are kept apart; the rest counts as one.
MAX_ADDRESSES = 64
_OTHERS = "many addresses"


class Refusals:
    """Counts by address, and tells some of them."""

    def __init__(self, where: str, tell: Callable[[str], object], quiet_about: Container[str] = ()) -> None:
        """Begins with none.

        Args:
            where: What they tried to connect to, in words.
            tell: Called with what an administrator should know.
            quiet_about: Reasons that are not worth a word: honest ranks may give them too.
        """
        self._where, self._tell, self._quiet_about = where, tell, quiet_about
        self._counts: dict[str, int] = {}

    def add(self, peer: str, reason: str) -> None:
        """A connection was turned away."""
        if reason in self._quiet_about:
            return
        name = peer if peer in self._counts or len(self._counts) < MAX_ADDRESSES else _OTHERS
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count > TOLD_EACH and not _is_power_of_ten(count):
            return
        among = "" if name == peer else f", one of {name},"
        rest = ""
        if count == TOLD_EACH:
            rest = f" (further ones from {'there' if name == peer else name} are counted, and few of them told)"
        elif count > TOLD_EACH:
            rest = f" (number {count:,} from {'there' if name == peer else name})"
        self._tell(f"{self._where}: turned a connection from {peer}{among} away: {reason}{rest}")


def _is_power_of_ten(count: int) -> bool:
    return str(count).rstrip("0") == "1"
