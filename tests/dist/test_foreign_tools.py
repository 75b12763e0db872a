"""Modules, optimizers and tools that know nothing of shards: refused in one line, on every rank.

All cases of a number of ranks run in one process group. docs/library.md names each.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from modules import Tower, inputs, is_layer
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")


def shard(module: nn.Module) -> nn.Module:
    return lowband.shard(module, ZERO3, lowband.Topology({}), is_layer, compute_dtype=torch.float32)


def sharded() -> nn.Module:
    return shard(Tower())


def with_parameter(values: torch.Tensor) -> None:
    module = Tower()
    module.first.extra = nn.Parameter(values, requires_grad=False)
    shard(module)


# ---- parameters that cannot be cut


def of_bytes() -> None:
    with_parameter(torch.zeros(3, dtype=torch.uint8))


def of_integers() -> None:
    with_parameter(torch.zeros(3, dtype=torch.int64))


def of_truth_values() -> None:
    with_parameter(torch.zeros(3, dtype=torch.bool))


def of_complex_numbers() -> None:
    with_parameter(torch.zeros(3, dtype=torch.complex64))


def lazy() -> None:
    module = Tower()
    module.first = nn.LazyLinear(7)
    shard(module)


class Quick(nn.Parameter):
    rate = 2.0


def of_a_class_of_its_own() -> None:
    module = Tower()
    module.scale = Quick(module.scale.detach())
    shard(module)


def with_a_tensor() -> None:
    module = Tower()
    module.scale.main_grad = torch.zeros(())
    shard(module)


def scripted() -> None:
    module = Tower()
    module.layers[1][0] = torch.jit.script(module.layers[1][0])
    shard(module)


def under_fsdp2() -> None:
    module = Tower()
    fully_shard(module.first, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shard(module)


def in_tensor_parallel() -> None:
    module, mesh = Tower(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"first": ColwiseParallel()})
    shard(module)


def tensor_parallel_afterwards() -> None:
    parallelize_module(
        sharded(), init_device_mesh("cpu", (dist.get_world_size(),)), {"first": ColwiseParallel()}
    )


class Adjoint(torch.autograd.Function):
    """Recomputes its module in the backward, as torchdiffeq does, for the parameters that it is given."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *parameters), grad, allow_unused=True)
        return None, *found


class Recomputed(Tower):
    """The module around a unit gives it the unit's parameters, which it has as shards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(self.layers[0], self.first(x), *self.layers[0].parameters()).sum()


def shards_in_a_function() -> None:
    shard(Recomputed())(inputs(0, dist.get_rank())).backward()


# ---- what came in afterwards


def replaced_submodule() -> None:
    model = sharded()
    model.layers[1][2] = nn.Linear(3, 7)
    model(inputs(0, dist.get_rank()))


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Parameter(torch.zeros(2, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.T).sum()


def adapter_after() -> None:
    model = sharded()
    model.first = Adapted(model.first)
    model(inputs(0, dist.get_rank()))


def new_parameter() -> None:
    model = sharded()
    model.offset = nn.Parameter(torch.zeros(7))
    model(inputs(0, dist.get_rank()))


def state_with_a_new_parameter() -> None:
    model = sharded()
    model.layers.append(nn.Linear(2, 2))
    lowband.full_state_dict(model)


# ---- tools of torch


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs(0, dist.get_rank())).backward()
    optimizer.step()
    return model, optimizer


def optimizer_state_by_torch() -> None:
    get_optimizer_state_dict(*stepped())


def optimizer_state_before_a_step() -> None:
    model = sharded()
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))


def saved_by_torch(state: dict[str, object]) -> None:
    try:
        dcp.save(state, checkpoint_id=FOLDER / "never", no_dist=False)
    except CheckpointException as error:  # torch's own, of all ranks
        raise error.failures[dist.get_rank()][0] from None


def optimizer_saved() -> None:
    saved_by_torch({"optimizer": stepped()[1]})


def shards_saved() -> None:
    saved_by_torch({"model": dict(sharded().named_parameters())})


def copies_saved() -> None:
    saved_by_torch({"average": {name: p.detach().clone() for name, p in sharded().named_parameters()}})


def averaged_by_ddp() -> None:
    DistributedDataParallel(nn.Sequential(sharded()))


def traced() -> None:
    torch.jit.trace(sharded(), inputs(0, 0))


def scripted_afterwards() -> None:
    torch.jit.script(sharded())


def part_scripted_afterwards() -> None:
    torch.jit.script(sharded().first)


def exported() -> None:
    torch.export.export(sharded(), (inputs(0, 0),), strict=False)


def exported_by_make_fx() -> None:
    make_fx(sharded())(inputs(0, 0))


def compiled_backward() -> None:
    loss = sharded()(inputs(0, dist.get_rank()))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def compiled_breadth_first() -> None:
    model = sharded()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        lowband.accumulate(model, [inputs(step, dist.get_rank()) for step in (0, 1)], model)


def compiled_pipeline() -> None:
    topology, parts = lowband.Topology({}), [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline = lowband.Pipeline(parts, nn.functional.mse_loss, "zero3", topology, micro_batches=1)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        pipeline.step([(torch.ones(1, 4), torch.ones(1, 4))])


def compiled_step() -> None:
    model = sharded()

    def step(x: torch.Tensor) -> None:
        model(x).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(inputs(0, dist.get_rank()))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x)).sum()


def vocabulary_resized() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    shard(model).resize_token_embeddings(13)


def part_copied() -> None:
    copy.deepcopy(sharded().layers[0][0])


def part_pickled() -> None:
    pickle.dumps(sharded().first)


def sparse_embedding() -> None:
    shard(Words())(torch.tensor([1, 2])).backward()


def initialised(fill: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def run() -> None:
        fill(sharded().layers[0][0].weight)

    run.__name__ = fill.__name__
    return run


REFUSED: dict[Callable[[], None], str] = {
    of_bytes: "Tower: 'first.extra' is of torch.uint8, and shards are fp32",
    of_integers: "'first.extra' is of torch.int64",
    of_truth_values: "'first.extra' is of torch.bool",
    of_complex_numbers: "'first.extra' is of torch.complex64",
    lazy: "Tower: 'first.weight' has no shape before a first forward",
    of_a_class_of_its_own: "Tower: 'scale' is a Quick, a class of its own",
    with_a_tensor: "Tower: 'scale' has a tensor as its attribute 'main_grad'",
    scripted: "Tower: 'layers.1.0' is compiled by torch.jit",
    shards_in_a_function: "layers.0.0.weight: a shard is saved for a backward",
    under_fsdp2: "'first.weight' is a DTensor over ranks [0, ",
    in_tensor_parallel: "'first.weight' is a DTensor over ranks [0, ",
    tensor_parallel_afterwards: "chunk of a shard covers this rank's part only",
    replaced_submodule: "Tower: 'layers.1.2.weight' came in after lowband.shard",
    adapter_after: "Tower: 'first.down' came in after lowband.shard",
    new_parameter: "Tower: 'offset' came in after lowband.shard",
    state_with_a_new_parameter: "'layers.3.weight' came in after lowband.shard",
    optimizer_state_by_torch: "AdamW: torch.distributed.checkpoint would keep one rank's part of its states",
    optimizer_state_before_a_step: "AdamW: torch.distributed.checkpoint would keep one rank's part",
    optimizer_saved: "AdamW: torch.distributed.checkpoint would keep one rank's part of its states",
    copies_saved: "torch.distributed.checkpoint would keep one rank's part (allowed: lowband.Checkpointer",
    shards_saved: "torch.distributed.checkpoint would keep one rank's part (allowed: lowband.Checkpointer",
    averaged_by_ddp: "Tower: DistributedDataParallel around a sharded module",
    traced: "Tower: torch.jit.trace of a sharded module",
    scripted_afterwards: "Tower: torch.jit.script of a sharded module",
    part_scripted_afterwards: "Tower: torch.jit.script of a sharded module",
    exported: "Tower: torch.export of a sharded module",
    exported_by_make_fx: "Tower: make_fx of a sharded module",
    compiled_backward: "Tower: compiled autograd of a sharded module",
    compiled_breadth_first: "Tower: compiled autograd of a sharded module",
    compiled_pipeline: "pipeline 0: compiled autograd of a sharded module",
    compiled_step: "Tower: compiled autograd of a sharded module",
    vocabulary_resized: "LlamaForCausalLM: resize_token_embeddings after lowband.shard",
    part_copied: "Linear: a part of a sharded module cannot be copied or pickled",
    part_pickled: "first.weight: a shard cannot be pickled: it is this rank's part only",
    sparse_embedding: "words.weight: its gradient is sparse (allowed: embeddings with sparse=False)",
    initialised(nn.init.kaiming_uniform_): "layers.0.0.weight: ",
    initialised(nn.init.kaiming_normal_): "layers.0.0.weight: values drawn after lowband.shard",
    initialised(nn.init.xavier_uniform_): "layers.0.0.weight: a shard is 1D, and has no size(1)",
    initialised(nn.init.xavier_normal_): "layers.0.0.weight: a shard is 1D, and has no size(1)",
    initialised(nn.init.orthogonal_): "layers.0.0.weight: values drawn after lowband.shard",
    initialised(nn.init.eye_): "layers.0.0.weight: values drawn after lowband.shard",
    initialised(nn.init.trunc_normal_): "layers.0.0.weight: values drawn after lowband.shard",
    initialised(nn.init.normal_): "layers.0.0.weight: normal_ draws values for this rank's part only",
    initialised(nn.init.uniform_): "layers.0.0.weight: uniform_ draws values for this rank's part only",
}
FOLDER = Path()  # set on each rank


def refusals(folder: Path) -> dict[str, str]:
    global FOLDER
    FOLDER, found = folder, {}
    warnings.simplefilter("ignore")  # of torch: an empty shard, tracing
    for case in REFUSED:
        try:
            case()
        except UserError as error:
            found[case.__name__] = str(error)
        except Exception as error:  # unclear
            found[case.__name__] = repr(error)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def refused(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, str]]]:
    yield on_ranks(request.param, refusals, tmp_path_factory.mktemp("never"), time_limit_s=300)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_refused_on_every_rank(case: Callable[[], None], refused: list[dict[str, str]]) -> None:
    for said in refused:
        assert REFUSED[case] in said.get(case.__name__, "nothing was raised")
        assert "\n" not in said[case.__name__]
