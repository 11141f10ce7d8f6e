"""One text from rank 0 to all ranks, by the PMIx of the launcher that started them: mpirun, or srun --mpi=pmix.

A program, which pmix.py runs in a process of its own: PMIx has threads and files, and a rank may have its own use for
it (MPI_Init). It needs nothing but Python's standard library. On its standard input comes

    {"libraries": [...], "words": "..."}    where libpmix may be, and what rank 0 has to say; others say nothing

and on its standard output what rank 0 said. It ends with 0, or with 1 and a reason on its standard error.

The structures are those of PMIx 2 and all later versions, which promise to keep them.
"""

import ctypes
import json
import signal
import sys

_PR_SET_PDEATHSIG = 1
_KEY = b"horovod.words"
_COLLECT_DATA = b"pmix.collect"
_GLOBAL = 3  # a scope: for ranks of this host and of others
_BOOL, _STRING = 1, 3  # types


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    # The largest member of pmix.h's union has three words.
    _fields_ = (("flag", ctypes.c_bool), ("string", ctypes.c_char_p), ("room", ctypes.c_void_p * 3))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


def _load(libraries: list[str]) -> ctypes.CDLL:
    for library in libraries:
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    raise LookupError("libpmix.so.2 was not found")


def _tell_all(pmix: ctypes.CDLL, words: str) -> str:
    def call(name: str, *arguments: object) -> None:
        code = getattr(pmix, name)(*arguments)
        if code != 0:
            text = pmix.PMIx_Error_string(code) or b""
            raise LookupError(f"{name}: {text.decode()} ({code})")

    pmix.PMIx_Error_string.restype = ctypes.c_char_p
    own, nothing, none = _Proc(), None, ctypes.c_size_t(0)
    call("PMIx_Init", ctypes.byref(own), nothing, none)
    try:
        if own.rank == 0:
            said = _Value(type=_STRING, data=_Data(string=words.encode()))
            call("PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(said))
        call("PMIx_Commit")
        collect = _Info(key=_COLLECT_DATA, value=_Value(type=_BOOL, data=_Data(flag=True)))
        call("PMIx_Fence", nothing, none, ctypes.byref(collect), ctypes.c_size_t(1))
        first = _Proc(nspace=own.nspace, rank=0)
        heard = ctypes.POINTER(_Value)()
        call("PMIx_Get", ctypes.byref(first), _KEY, nothing, none, ctypes.byref(heard))
        if heard.contents.type != _STRING:
            raise LookupError("rank 0 said something that is no text")
        return str(heard.contents.data.string.decode())
    finally:
        pmix.PMIx_Finalize(nothing, none)


def main() -> int:
    """Says and hears. Who waits for it has a limit; it ends with that process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    task = json.load(sys.stdin)
    try:
        print(_tell_all(_load(task["libraries"]), task["words"]))
    except (LookupError, AttributeError) as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
