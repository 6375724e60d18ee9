"""One rank of PyTorch or DeepSpeed: python torch_worker.py SHAPE KIND. Started by peers.py.

KIND: ddp, ddp+zero (ZeroRedundancyOptimizer), fsdp2, fsdp2+reshard (after forward), deepspeed0
to deepspeed3.
"""

import os
import sys
from contextlib import nullcontext

import task
import torch
import torch.distributed as dist
from shapes import shape_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import TorchGPT
from turns import SOCKET, Turns


def main(shape_name, kind):
    """Train when told to."""
    torch.set_num_threads(1)
    if kind.startswith("deepspeed"):
        import deepspeed  # noqa: F401  (its memory counts as imports)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ[SOCKET]}.store", rank=rank, world_size=size
    )
    turns, shape = Turns(), shape_of(shape_name)
    torch.manual_seed(task.SEED)
    with torch.device("meta") if kind.startswith("fsdp2") else nullcontext():
        model = TorchGPT(shape)
    if kind.startswith("fsdp2"):
        shard(model, reshard=kind.endswith("reshard"))
    load(model, task.initial_weights(task.model_of(shape)))
    step = (
        deepspeed_step(model, int(kind[-1]), shape)
        if kind.startswith("deepspeed")
        else torch_step(model, kind)
    )

    def train_step(inputs, targets):
        return step(torch.from_numpy(inputs), torch.from_numpy(targets))

    turns.serve(task.Batches(shape, dist.get_rank(), dist.get_world_size()), train_step)
    os._exit(0)  # gloo's and DeepSpeed's own ends may wait for the other ranks'


def shard(model, reshard):
    """FSDP2: a group a block and one for the rest; the memory of the shards is made after that."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")


@torch.no_grad()
def load(model, weights):
    """Assign the initial weights by name; of a sharded parameter this rank's rows."""
    parameters = dict(model.named_parameters())
    for name, array in weights:
        value, into = torch.from_numpy(array), parameters.pop(name)
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.t()  # nn.Linear keeps (out, in)
        if hasattr(into, "to_local"):
            chunks = value.chunk(dist.get_world_size(), dim=0)
            into = into.to_local()
            value = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else value[:0]
        into.copy_(value)
    assert not parameters, f"left without a weight: {list(parameters)}"


def groups(model):
    """Matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": task.WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def torch_step(model, kind):
    """step(inputs, targets) -> this rank's mean loss. AdamW is fused: PyTorch's fastest."""
    if kind == "ddp+zero":
        optimizer = ZeroRedundancyOptimizer(
            groups(model), optimizer_class=torch.optim.AdamW, fused=True, **task.ADAMW
        )
    else:
        optimizer = torch.optim.AdamW(groups(model), fused=True, **task.ADAMW)
    wrapped = (
        DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind.startswith("ddp")
        else model
    )

    def step(inputs, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = wrapped(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
        optimizer.step()
        return loss.detach()

    return step


def deepspeed_step(model, stage, shape):
    """The same with DeepSpeed's engine."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_clipping": task.CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups(model), fused=True, **task.ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    def step(inputs, targets):
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
