"""The exceptions of all bindings."""


class HorovodInternalError(RuntimeError):
    """A collective or init failed for a reason outside this rank's own call; elastic training recovers from it."""


class HorovodMismatchError(HorovodInternalError):
    """The ranks disagree about a tensor (shape, dtype, operation ...). Every rank gets it, and the job goes on."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: not an error, but a reason to start over from the last commit.

    Args:
        skip_sync: True if hosts were only removed, so that the state of the remaining ranks is still the same.
    """

    def __init__(self, skip_sync: bool) -> None:
        """Keeps skip_sync."""
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Says that a framework's version is not the one that a binding was made for."""
    return f"The binding for {name} was made for version {version}, but version {installed_version} is installed."


class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the one that a binding was made for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        """Keeps the three and makes the text."""
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
