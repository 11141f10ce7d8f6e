"""Identity, process sets and introspection, on one rank and on several."""

import pytest
from ranks import run_ranks

import horovod
import horovod.numpy as hvd
from horovod import _core
from horovod.common.basics import HorovodBasics
from horovod.common.util import is_version_greater_equal_than, num_rank_is_power_2, split_list

ASKING = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"]


def all_numbers(*_: object) -> list[object]:
    hvd.init()
    return [getattr(hvd, name)() for name in ASKING]


def numbers_of_a_second_instance() -> list[object]:
    hvd.init()
    return [getattr(HorovodBasics(__file__, "mpi_lib"), name)() for name in ASKING]


def life_of_a_set() -> list[object]:
    pair, other = hvd.ProcessSet([1, 0]), hvd.ProcessSet(range(1, 3))
    before = (pair.process_set_id, pair.size(), pair.included())
    hvd.init(process_sets=[pair, other])
    again = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[again, hvd.ProcessSet([1, 2])])
    during = (pair.process_set_id, other.process_set_id, again.process_set_id, pair.size(), pair.included())
    position = other.rank() if other.included() else "not a member"
    with pytest.raises(ValueError, match="Horovod runs already, with the process sets"):
        hvd.init(process_sets=[hvd.ProcessSet([0])])
    hvd.shutdown()
    after = (pair.process_set_id, again.process_set_id, pair.size())
    return [before, during, position, after]


def test_the_versions_agree() -> None:
    assert horovod.__version__ == _core.version()


@pytest.mark.parametrize("name", [*ASKING, "mpi_threads_supported", "stop_timeline"])
def test_before_init_every_question_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=r"^Horovod has not been initialized; use hvd\.init\(\)\.$"):
        getattr(hvd, name)()


def test_before_init_operations_say_so() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="not been initialized"):
        hvd.allreduce([1.0])


def test_identity_of_one_and_of_three() -> None:
    assert run_ranks(1, all_numbers) == [[0, 1, 0, 1, 0, 1, True]]
    assert run_ranks(3, all_numbers) == [[rank, 3, rank, 3, 0, 1, True] for rank in range(3)]
    assert run_ranks(2, numbers_of_a_second_instance) == [[rank, 2, rank, 2, 0, 1, True] for rank in range(2)]


def test_what_is_not_there_is_not_claimed() -> None:
    for name in ("mpi", "gloo", "ddl", "ccl", "cuda", "rocm"):
        assert getattr(hvd, name + "_built")() is False
    assert hvd.nccl_built() == 0
    assert not hvd.mpi_enabled()
    assert not hvd.gloo_enabled()
    with pytest.raises(NotImplementedError, match="no timeline"):
        hvd.start_timeline("x.json")


def test_process_sets_get_ids_in_order_and_lose_them_at_shutdown() -> None:
    for rank, (before, during, position, after) in enumerate(run_ranks(3, life_of_a_set)):
        assert before == (None, None, None)
        assert during == (1, 2, 1, 2, rank < 2)
        assert position == ("not a member" if rank == 0 else rank - 1)
        assert after == (None, None, None)


def wrong_arguments() -> None:
    for arguments, kind, words in (
        ({"process_sets": [hvd.ProcessSet([0]), hvd.ProcessSet([0])]}, ValueError, r"process_sets\[1\].*duplicate of"),
        ({"process_sets": [hvd.ProcessSet([1, 0])]}, ValueError, r"process_sets\[0\].*duplicate of the global"),
        ({"process_sets": [hvd.ProcessSet([2])]}, ValueError, r"invalid rank 2, the job has the ranks 0 to 1"),
        ({"process_sets": [hvd.ProcessSet([-1])]}, ValueError, r"invalid rank -1"),
        ({"process_sets": [hvd.ProcessSet([0, 0])]}, ValueError, r"more than once"),
        ({"process_sets": [hvd.ProcessSet([])]}, ValueError, r"at least one rank"),
        ({"process_sets": [[0]]}, ValueError, r"expected a ProcessSet"),
        ({"process_sets": "static"}, ValueError, r"""a list of process sets or "dynamic", got 'static'"""),
        ({"comm": [0]}, ValueError, r"expected all ranks, 0 to 1.*process_sets"),
        ({"comm": 5}, ValueError, r"list of all ranks"),
    ):
        with pytest.raises(kind, match=words):
            hvd.init(**arguments)
    hvd.init(comm=[0, 1])  # all failed before anyone met: the next attempt works


def test_wrong_arguments_of_init() -> None:
    run_ranks(2, wrong_arguments)


def test_process_sets_can_not_be_made_of_anything() -> None:
    for wrong in ("01", 3, [0.5], ["0"], [True]):
        with pytest.raises(ValueError, match="expected a list of ranks"):
            hvd.ProcessSet(wrong)
    assert str(hvd.ProcessSet([2, 1])) == "ProcessSet(process_set_id=None, ranks=[1, 2], mpi_comm=None)"


def test_before_init_no_set_can_be_added_and_there_is_none_to_remove() -> None:
    with pytest.raises(ValueError, match=r"^Horovod has not been initialized; use hvd\.init\(\)\.$"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False


def refused_place() -> str:
    with pytest.raises(ValueError, match=r"^init: ") as caught:
        hvd.init()
    return str(caught.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOROVOD_CROSS_SIZE": "2"}, "HOROVOD_CROSS_SIZE=2, but all 1 ranks are on host testhost: expected 1"),
        ({"HOROVOD_SIZE": "4"}, "HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT must be set"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, "on one host they must be the same"),
        ({"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, "rank 0 must be local rank 0"),
    ],
)
def test_a_place_that_can_not_be_is_refused(variables: dict[str, str], words: str) -> None:
    (text,) = run_ranks(1, refused_place, env=variables, hosts=[1])
    assert words in text


def test_split_list_and_friends() -> None:
    assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [n for n in range(-1, 9) if num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert is_version_greater_equal_than("2.1.0+cu12", "2.0.9")
    assert not is_version_greater_equal_than("2.1rc1", "2.1.1")
