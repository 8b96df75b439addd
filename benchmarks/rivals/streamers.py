"""Loaders that give each rank a stream of tensors, from which the rank copies its shards."""

import math
from collections.abc import Callable

import fastsafetensors as fast
import torch
import torch.distributed as dist
from rivals.model import empty_sharded, materialize
from rivals.rows import Case
from rivals.slices import files_of, wanted
from runai_model_streamer import SafetensorsStreamer


def runai(
    case: Case, built: Callable[[], None], lean: bool = False, distributed: bool = False
) -> torch.nn.Module:
    """runai-model-streamer. lean: streams only the tensors that the rank needs, and lends them from
    its buffer (`owned=False`), which the row's environment makes as small as possible."""
    model = empty_sharded(case)
    built()
    materialize(model)
    pieces = wanted(case, model)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(
            files_of(case),
            is_distributed=distributed,
            tensor_names=pieces.keys() if lean else None,
            owned=not lean,
        )
        for name, tensor in streamer.get_tensors():
            if name in pieces:
                pieces[name].destination.copy_(tensor[pieces[name].region])
    return model


def fastsafetensors(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Each rank reads some of the files, and tensors are scattered by rows.

    The tensors of an expert are sent only to the rank that holds it. With TP every rank gets
    complete tensors, since the library can scatter along one dim only.
    """
    model = empty_sharded(case)
    built()
    materialize(model)
    pieces = wanted(case, model)
    loader = fast.SafeTensorsFileLoader(dist.group.WORLD, device="cpu", nogds=True)
    files = files_of(case)
    loader.add_filenames({rank: files[rank :: case.world] for rank in range(case.world)})
    buffers = loader.copy_files_to_device()
    for name in loader.get_keys():
        expert = expert_rank(case, model, name)
        if expert is not None:
            tensor = buffers.push_tensor(name, expert)
            if tensor is not None:
                pieces[name].destination.copy_(tensor)
        elif case.tp > 1:
            tensor = buffers.get_tensor(name)
            pieces[name].destination.copy_(tensor[pieces[name].region])
        else:
            tensor = buffers.get_sharded(name, 0)
            if name in pieces:
                pieces[name].destination.copy_(tensor)
    buffers.close()
    loader.close()
    return model


def expert_rank(case: Case, model: torch.nn.Module, name: str) -> int | None:
    """The rank that holds the expert to which a stored tensor belongs; None if the tensor belongs
    to no expert."""
    _, is_experts, rest = name.partition(".experts.")
    if not is_experts:
        return None
    return int(rest.partition(".")[0]) // math.ceil(model.config.num_experts / case.world)


def fastsafetensors_local(case: Case, built: Callable[[], None]) -> torch.nn.Module:
    """Each rank reads the tensors that it needs, in batches of at most the bytes of the largest
    parameter in bf16."""
    model = empty_sharded(case)
    built()
    materialize(model)
    pieces = wanted(case, model)
    loader = fast.ParallelLoader(
        None,
        files_of(case),
        queue_size=-1,
        use_tqdm_on_load=False,
        nogds=True,
        all_local=True,
        tensor_filter=pieces.__contains__,
        max_batch_bytes=2 * max(parameter.numel() for parameter in model.parameters()),
        accumulate_resident=False,
        borrowed_tensors=True,
    )
    for name, tensor in loader.iterate_weights():
        pieces[name].destination.copy_(tensor[pieces[name].region])
    loader.close()
    return model
