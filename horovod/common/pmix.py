"""What rank 0 tells all ranks through the PMIx of their launcher: a key for the job, and which host is its own.

mpirun and `srun --mpi=pmix` give every rank a connection to themselves, and through it ranks can tell each other
something before they know where the others are. Ranks of several hosts need a key; if nobody has given them one, rank 0
makes it up. And mpirun does not tell on which host rank 0 is; rank 0 does.

All ranks take part, whatever each of them lacks, and wait for each other: who has a key might be alone with it. A rank
can take part once; what it heard stays for later inits of the same process. The words are as safe as the launcher's
own connections (docs/security.md).
"""

import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from horovod.common.environment import read
from horovod.common.exceptions import HorovodInternalError

_log = logging.getLogger("horovod")

_CLIENT = Path(__file__).with_name("pmix_client.py")
_LIBRARY = "libpmix.so.2"
# Prefixes of installations, as Open MPI and PMIx tell them; and where below they have the library.
_PREFIXES = ("PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX")
_FOLDERS = ("lib", "lib64", "lib/openmpi", "lib64/openmpi", "lib/pmix")

_WHAT_TO_SET = (
    "Give all ranks the same HOROVOD_SECRET_KEY, or HOROVOD_SECRET_KEY_FILE: mpirun takes `-x HOROVOD_SECRET_KEY`, "
    "srun passes on what is exported."
)

_heard: dict[str, str] = {}  # by namespace, the launcher's name for a job


class Unavailable(Exception):
    """Ranks can't tell each other anything by PMIx; the text says why."""


def complete(environ: Mapping[str, str], seconds: float) -> Mapping[str, str]:
    """The environment with the key and the host that rank 0 has told, as far as they are not given.

    Args:
        environ: With the variables of horovod.common.schedulers; PMIx is offered.
        seconds: How long to wait for the other ranks.

    Raises:
        HorovodInternalError: There is no key, or only some ranks have one.
    """
    has_key = bool(environ.get("HOROVOD_SECRET_KEY_FILE") or environ.get("HOROVOD_SECRET_KEY"))
    needs_key = not has_key and not read("HOROVOD_INSECURE", environ)
    own = {"host": environ.get("PMIX_HOSTNAME", ""), "key": secrets.token_hex(32) if needs_key else ""}
    try:
        told = _decode(_tell_all(json.dumps(own), environ, seconds))
    except Unavailable as reason:
        if needs_key:
            raise HorovodInternalError(
                f"init: the job is on several hosts, and there is no key by which they know each other: rank 0's could "
                f"not be had through the launcher ({reason}). {_WHAT_TO_SET}"
            ) from None
        _log.debug("init: rank 0 tells nothing through the launcher: %s", reason)
        return environ
    if told["key"] and has_key:
        raise HorovodInternalError(f"init: this rank was given a key for the job, and rank 0 was not. {_WHAT_TO_SET}")
    if needs_key and not told["key"]:
        raise HorovodInternalError(
            f"init: rank 0 was given a key for the job (or HOROVOD_INSECURE=1), and this rank was not. {_WHAT_TO_SET}"
        )
    found = dict(environ)
    if told["key"]:
        found["HOROVOD_SECRET_KEY"] = told["key"]
    if told["host"] and not os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = told["host"]
    return found


def _decode(words: str) -> dict[str, str]:
    try:
        told = json.loads(words)
        return {name: str(told[name]) for name in ("host", "key")}
    except (ValueError, TypeError, LookupError):
        raise Unavailable("rank 0 said something else than expected: has it the same version of Horovod?") from None


def _tell_all(words: str, environ: Mapping[str, str], seconds: float) -> str:
    """What rank 0 says, on all ranks.

    Raises:
        Unavailable: There is no library, the launcher does not answer, or a rank did not come in time.
    """
    namespace = environ["PMIX_NAMESPACE"]
    if namespace not in _heard:
        if not sys.executable:
            raise Unavailable("this Python is part of another program, and has none of its own")
        task = json.dumps({"libraries": _libraries(environ), "words": words})
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", str(_CLIENT)],
                env=dict(environ),
                input=task,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"not all ranks came to init within {seconds:g} s") from None
        except OSError as error:
            raise Unavailable(f"{sys.executable} does not start: {error.strerror}") from None
        if ended.returncode != 0:
            raise Unavailable((ended.stderr.strip().splitlines() or ["libpmix ended its process"])[-1])
        # The last line, whatever the library itself may have said before.
        _heard[namespace] = ended.stdout.strip().rpartition("\n")[2]
    return _heard[namespace]


def _libraries(environ: Mapping[str, str]) -> list[str]:
    """Where libpmix may be: in the launcher's own installation first."""
    prefixes = [Path(environ[name]) for name in _PREFIXES if environ.get(name)]
    places = [prefix / folder / _LIBRARY for prefix in prefixes for folder in _FOLDERS]
    return [*(str(place) for place in dict.fromkeys(places)), _LIBRARY]
