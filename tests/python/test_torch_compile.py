"""torch.compile: operations inside a compiled function run in the order of the program, all of them, with gradients."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import horovod.torch as hvd
from horovod.torch import compiled, compiled_rows

FORKED_WITH = ["torch._inductor.compile_fx"]  # see forking.py
BACKENDS = ["eager", "inductor"]  # which begins with what aot_eager does
COMPILING_SECONDS = 400
CompileOn = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def compile_on(tmp_path_factory: pytest.TempPathFactory) -> CompileOn:
    """As run_ranks, but what is compiled is not left behind, and no rank starts processes of its own for it."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return functools.partial(run_ranks, env=environment, timeout=COMPILING_SECONDS)


@contextmanager
def recorded_names() -> Iterator[list[str]]:
    """The names of the operations that run, in order."""
    names: list[str] = []
    replaced: list[tuple[Any, str, Any]] = []

    def watch(module: Any, function: str, names_of: Callable[[Any], list[str]]) -> None:
        original = getattr(module, function)

        def watched(argument: Any) -> Any:
            argument = list(argument) if function == "run_group" else argument
            names.extend(names_of(argument))
            return original(argument)

        replaced.append((module, function, original))
        setattr(module, function, watched)

    for module in (compiled, compiled_rows):
        watch(module, "run", lambda request: [request[1]])
        watch(module, "run_group", lambda requests: [request[1] for request in requests])
    watch(compiled, "wait_for_all", lambda set_id: [f"barrier {set_id}"])
    try:
        yield names
    finally:
        for module, function, original in replaced:
            setattr(module, function, original)


def in_order(x: Tensor, y: Tensor) -> Tensor:
    """Results that are not used, operations that don't depend on each other, and a barrier between."""
    hvd.allreduce(x, name="unused first")
    late = hvd.allreduce(y * 2, name="late", op=hvd.Sum)
    hvd.broadcast(x, 0, name="unused second")
    hvd.barrier()
    early = hvd.allreduce(x + 1, name="early")
    hvd.allreduce(y, name="unused last")
    return (early * late).sum()


def check_order() -> None:
    hvd.init()
    for backend in BACKENDS:
        torch._dynamo.reset()
        function = torch.compile(in_order, fullgraph=True, backend=backend)
        for grad in (True, False):
            x = torch.full((5,), float(hvd.rank()), requires_grad=grad)
            y = torch.full((5,), 3.0, requires_grad=grad)
            with recorded_names() as names:
                result = function(x, y)
            forward = ["allreduce.unused first", "allreduce.late", "broadcast.unused second", "barrier 0"]
            assert names == [*forward, "allreduce.early", "allreduce.unused last"], (backend, grad, names)
            average, total = sum(range(hvd.size())) / hvd.size() + 1, 6.0 * hvd.size()
            assert result.item() == pytest.approx(5 * average * total)
            if grad:
                with recorded_names() as names:
                    result.backward()
                assert sorted(names) == [f"allreduce.allreduce.{name}.grad" for name in ("early", "late")], (
                    backend,
                    names,
                )
                assert x.grad is not None
                assert y.grad is not None
                assert x.grad.tolist() == pytest.approx([total] * 5)
                assert y.grad.tolist() == pytest.approx([average * 2 * hvd.size()] * 5)


def test_operations_are_neither_dropped_nor_reordered(compile_on: CompileOn) -> None:
    compile_on(2, check_order)


# ---- Every operation -------------------------------------------------------------------------------------------------


def every_static(x: Tensor) -> list[Tensor]:
    """All forms whose results have shapes that the compiler can know."""
    half = hvd.allreduce(x, name="compressed", compression=hvd.Compression.bf16)
    handle = hvd.allreduce_async(x, name="async", op=hvd.Sum)
    first, second = hvd.grouped_allreduce([x, x * 2], name="group", op=hvd.Sum)
    in_place = x.detach().clone()
    hvd.allreduce_(in_place, name="in place", op=hvd.Sum)
    sent = x.detach().clone()
    sent = hvd.synchronize(hvd.broadcast_async_(sent, 1, name="sent"))
    grouped = [x.detach() + 1, x.detach() + 2]
    hvd.grouped_allreduce_(grouped, name="group in place", prescale_factor=2.0)
    part = hvd.reducescatter(x, name="part", op=hvd.Sum)
    a, b = hvd.grouped_reducescatter([x, x * 3], name="parts")
    root = hvd.broadcast(x, 1, name="root")
    unnamed = hvd.allreduce(x * hvd.rank())
    return [half, hvd.synchronize(handle), first, second, in_place, sent, *grouped, part, a, b, root, unnamed]


def every_dynamic(x: Tensor) -> list[Tensor]:
    """The forms whose number of rows depends on the other ranks."""
    gathered = hvd.allgather(x, name="gathered")
    a, b = hvd.grouped_allgather([x, x * 2], name="gathered together")
    exchanged, received = hvd.alltoall(x, splits=torch.tensor([1] * hvd.size()), name="exchanged")
    later = hvd.synchronize(hvd.alltoall_async(x[: 2 * hvd.size()], name="later"))
    return [gathered, a, b, exchanged, received, later]


def compare(function: Callable[[Tensor], list[Tensor]], x: Tensor, backend: str) -> None:
    """The compiled function gives the results and gradients of the function itself."""
    results = []
    for form in (function, torch.compile(function, fullgraph=True, backend=backend)):
        source = x.clone().requires_grad_()
        outputs = form(source)
        weights = [torch.arange(1.0, output.numel() + 1).view(output.shape) for output in outputs]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad)
        assert isinstance(loss, Tensor)
        loss.backward()
        assert source.grad is not None
        results.append([*(output.detach() for output in outputs), source.grad])
    for number, (want, found) in enumerate(zip(*results, strict=True)):
        assert torch.allclose(found, want, rtol=1e-5), f"{backend}, result {number}: {found}, expected {want}"


def check_every(backend: str) -> None:
    hvd.init()
    size = hvd.size()
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    random = torch.Generator().manual_seed(hvd.rank())
    compare(every_static, torch.randn(2 * size + 1, 3, generator=random), backend)
    compare(every_dynamic, torch.randn(2 * size + hvd.rank(), 3, generator=random), backend)
    hvd.barrier()


def test_every_operation_in_a_compiled_function(compile_on: CompileOn) -> None:
    compile_on(2, check_every, "inductor")
    compile_on(3, check_every, "aot_eager")


# ---- Around the operations -------------------------------------------------------------------------------------------


def check_sets_and_breaks() -> None:
    """Process sets, unnamed operations called again and again, and graphs that break in the middle of an operation."""
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])

    def in_set(x: Tensor) -> Tensor:
        return hvd.allreduce(x, op=hvd.Sum, process_set=pair)

    if pair.included():
        compiled_in_set = torch.compile(in_set, fullgraph=True, backend="aot_eager")
        for number in range(5):
            assert compiled_in_set(torch.full((2,), float(number))).tolist() == [2.0 * number] * 2

    def broken(x: Tensor) -> Tensor:
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        print("the graph breaks here")
        assert hvd.poll(handle)
        return hvd.synchronize(handle) * 2  # type: ignore[no-any-return]

    assert torch.compile(broken, backend="aot_eager")(torch.ones(2)).tolist() == [6.0, 6.0]


def test_process_sets_and_graph_breaks(compile_on: CompileOn) -> None:
    compile_on(3, check_sets_and_breaks)


def check_batch_norm() -> None:
    """A compiled model with SyncBatchNorm does what it does uncompiled."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.ReLU())
    batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    results: list[list[Tensor]] = []
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for form in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.load_state_dict(state)
        model.zero_grad()
        output = form(batch)
        (output * torch.arange(24.0).view(6, 4)).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([output.detach(), *gradients, *(value.clone() for value in model.state_dict().values())])
    for want, found in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_batch_norm_in_a_compiled_model(compile_on: CompileOn) -> None:
    compile_on(2, check_batch_norm)


def check_operators() -> None:
    """What PyTorch itself checks of an operator: schema, fake results, autograd."""
    hvd.init()
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (compiled.allreduce, (x, "a", hvd.Sum, 0, 1.0, 1.0)),
        (compiled.grouped_allreduce, ([x, y], "b", hvd.Average, 0, 1.0, 1.0)),
        (compiled.broadcast, (x, 0, "c", 0)),
        (compiled_rows.allgather, (x, "d", 0, 1)),
        (compiled_rows.grouped_allgather, ([x, y], "e", 0, 1)),
        (compiled_rows.alltoall, (x, torch.tensor([3]), "f", 0, 1)),
        (compiled_rows.reducescatter, (x, "g", hvd.Sum, 0, 4, 1.0, 1.0, 1.0)),
        (compiled_rows.grouped_reducescatter, ([x, y], "h", hvd.Average, 0, [4, 5], 1.0, 1.0, 1.0)),
        (compiled_rows.gather_rows, (x.detach(), "i", 0, 4)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments)


def test_the_operators_pass_pytorchs_own_checks(compile_on: CompileOn) -> None:
    compile_on(1, check_operators)
