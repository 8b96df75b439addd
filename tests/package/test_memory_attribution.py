"""`modicum.memory.attribute` finds the owner of each byte of a process tree, and
`modicum.torch.protect` excludes other libraries' buffers from forks.

Copies are compared with Pss_Anon, which the tests read from /proc/PID/smaps_rollup. Catches: copies
that are omitted or counted once per child; views that are counted in addition to their base; a
protection that remains after its tensor is freed, or that omits tensors allocated in the first
step; a torch optimizer that is refused before its first step; a refusal that leaves a hook; indices
or values of a sparse tensor that are not counted; peaks that forget the copies of ended children.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from adamw_memory import pss_anon
from program import living_children

import modicum.torch
from modicum import UsageError, memory
from modicum._modicum import MainThreadPause

pytestmark = pytest.mark.alone  # measures this process and its children

MIB = 1 << 20
NUMEL = 4 * MIB  # of float32: 16 MiB
SIZE = 4 * NUMEL
EDGE = 2 * 4096  # the pages at both ends of a tensor, which hold other memory as well
SLACK = 8 * MIB  # malloc may at any time return memory to the kernel that earlier tests freed
BIG = 10 * MIB  # elements: 40 MiB, for which malloc always makes a new mapping


def near(size: int) -> Any:
    """Matches `size` bytes up to EDGE."""
    return pytest.approx(size, abs=EDGE)


# ---- attribution


def test_copies_are_attributed_to_their_owner() -> None:
    master, moments = torch.ones(NUMEL), torch.ones(NUMEL)
    before = memory.attribute({"master": master, "moments": [moments]})
    assert before.params == NUMEL
    assert before["master"].held_bytes == near(SIZE)
    assert before.copied_bytes == 0
    with living_children(2) as pids:
        master.mul_(2)
        moments[: NUMEL // 2].mul_(2)
        # The call itself makes the interpreter write to its inherited pages; the second call
        # counts these copies as well, as `tree` does.
        memory.attribute({"master": master, "moments": [moments]})
        who = memory.attribute({"master": master, "moments": [moments]})
        tree = pss_anon([os.getpid(), *pids])
    assert (who.processes, who.forked) == (3, 2)
    assert who["master"].copied_bytes == near(SIZE)
    assert who["moments"].copied_bytes == near(SIZE // 2)
    assert who["master"].held_bytes == who["moments"].held_bytes == near(SIZE)
    shared = who["shared memory"].held_bytes + who["page tables"].held_bytes
    assert who.total_bytes - shared == pytest.approx(tree, rel=0.01)


def test_without_parameters_there_are_no_bytes_per_parameter() -> None:
    who = memory.attribute({"history": [torch.ones(BIG)]})
    assert who.params == 0
    assert "B/param" not in who.text() and "parameters" not in who.text()
    assert "history                              40.0              0.0" in who.text()
    assert who.kinds["anonymous"] > 40 * MIB
    assert f"by kind: anonymous {who.kinds['anonymous'] / MIB:.1f}" in who.text()


def test_every_byte_has_an_owner() -> None:
    gc.collect()
    before = memory.held()
    tensors = [torch.ones(BIG) for _ in range(2)]
    who = memory.attribute({"master": tensors}, baseline=before)
    assert abs(who.unexplained_bytes) < SLACK
    known = sum(owner.held_bytes + owner.copied_bytes for owner in who.owners)
    assert known + who.baseline_bytes + who.unexplained_bytes == who.total_bytes
    assert who.document["owners"][0]["held_per_param"] == pytest.approx(4, abs=0.01)
    assert "master                         80.0     4.000        0.0     0.000" in who.text()


def test_views_count_once() -> None:
    flat = torch.ones(NUMEL)
    parts = {"first": flat[:1000], "master": flat, "second": list(flat.split(NUMEL // 4))}
    who = memory.attribute(parts)
    assert who["first"].held_bytes == 4000
    assert who["master"].held_bytes == near(SIZE - 4000)
    assert who["second"].held_bytes == 0
    assert who.params == NUMEL


def test_tensors_without_host_memory_are_not_counted() -> None:
    reserved = torch.empty(64 * NUMEL)  # mapped, but never written
    elsewhere = torch.empty(NUMEL, device="meta")
    who = memory.attribute({"reserved": reserved, "elsewhere": elsewhere, "none": torch.empty(0)})
    assert who["reserved"].held_bytes < MIB
    assert who["elsewhere"].held_bytes == 0


# Bytes per bfloat16 parameter, including the parameter. In all formats but fp32 the parameter is
# the upper half of its master.
DECLARED = {
    "fp32": 16 + 2,
    "fp32-split": 14,
    "bf16-moments": 10,
    "int8-moments": 8.0625,
    "int8-moments-24": 7.0625,
}


@pytest.mark.parametrize("state_format", DECLARED)
def test_our_optimizer_holds_the_bytes_of_its_format(state_format: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(NUMEL // 256, 256, dtype=torch.bfloat16))
    optimizer = modicum.torch.AdamW([parameter], state_format=state_format)
    who = memory.attribute(optimizer)
    held = sum(who[name].held_bytes for name in ("master", "gradient", "moments", "weights"))
    assert held / NUMEL == pytest.approx(DECLARED[state_format], abs=0.01)
    assert who.params == NUMEL
    with living_children(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after = memory.attribute(optimizer)
    # Modicum's memory is left out of forks. The parameter is torch's memory, which children
    # inherit.
    inherited = 0 if state_format == "fp32" else 2 * NUMEL
    assert sum(after[name].copied_bytes for name in ("gradient", "moments")) == 0
    assert after["master"].copied_bytes == pytest.approx(inherited, abs=EDGE)


def test_a_ledger_counts_instead_of_its_tensors() -> None:
    gc.collect()
    before = memory.held()
    ledger = modicum.Ledger()
    optimizer = modicum.torch.AdamW(
        [torch.nn.Parameter(torch.ones(BIG))], memory=modicum.torch.MemoryPolicy(ledger=ledger)
    )
    who = memory.attribute(ledger, params=BIG, baseline=before)
    assert who["ledger: moments"].held_bytes == ledger.held["moments"]
    assert who.unexplained_bytes == pytest.approx(4 * BIG, abs=SLACK)  # of the parameter
    del optimizer


def test_weights_gradients_and_moments_of_torch_are_attributed() -> None:
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    who = memory.attribute(model, optimizer)
    sizes = {name: who[name].held_bytes for name in ("weights", "gradient", "moments")}
    assert sizes == {"weights": near(SIZE), "gradient": near(SIZE), "moments": near(2 * SIZE)}
    assert who.params == NUMEL


@pytest.mark.filterwarnings("ignore:Sparse")  # torch: "support is in beta state"
@pytest.mark.parametrize("layout", ["uncoalesced", "coo", "csr", "csc", "bsr", "bsc"])
def test_indices_and_values_of_sparse_tensors_are_counted(layout: str) -> None:
    dense = torch.ones(512, 2048)
    indices = 2 * 8 * dense.numel()
    if layout == "coo":
        sparse = dense.to_sparse()
    elif layout == "uncoalesced":
        full = dense.to_sparse()
        sparse = torch.sparse_coo_tensor(full.indices(), full.values(), is_coalesced=False)
    else:
        blocks = (1, 1) if layout.startswith("b") else None
        sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=blocks)
        indices //= 2  # and one for each row or column
    who = memory.attribute({"master": torch.nn.Parameter(sparse)})
    assert who["master"].held_bytes == pytest.approx(4 * dense.numel() + indices, abs=4 * EDGE)
    assert who.params == dense.numel()


def test_sparse_gradients_are_attributed_and_protected() -> None:
    model = torch.nn.Embedding(1 << 16, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.arange(1 << 15)).sum().backward()
    size = (8 + 4 * 64) << 15
    assert memory.attribute(model)["gradient"].held_bytes == pytest.approx(size, abs=2 * EDGE)
    assert modicum.torch.protect(optimizer).bytes == pytest.approx(size, abs=2 * EDGE)


def test_parameters_without_a_shape_have_no_memory() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())
    assert memory.attribute(model)["weights"].held_bytes == 8  # the number of batches


def test_tensors_of_other_layouts_are_refused() -> None:
    with pytest.raises(UsageError, match="UNSUPPORTED: a tensor of unknown layout.*_mkldnn"):
        memory.attribute(torch.ones(4).to_mkldnn())


@pytest.mark.parametrize("source", [torch.Tensor, torch.nn.Linear, torch.optim.AdamW])
def test_classes_are_no_sources(source: Any) -> None:
    with pytest.raises(UsageError, match=f"a class .*got {source.__name__}"):
        memory.attribute(source)


@pytest.mark.parametrize("name", ["params", "baseline"])
@pytest.mark.parametrize("value", ["2 GiB", -1, float("nan")])
def test_other_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is out of range"):
        memory.attribute(**{name: value})


@pytest.mark.parametrize("source", [3, "text", None, object()])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(UsageError, match="a source of unknown kind"):
        memory.attribute(source)


def zero_optimizer(name: str, **attributes: Any) -> Any:
    """A stand-in for an object of DeepSpeed's class `name`, with these attributes."""
    return type(name, (), {"__module__": "deepspeed.runtime.zero", **attributes})()


def test_an_engine_without_zero_is_refused() -> None:
    other = zero_optimizer("FP16_Optimizer", optimizer=torch.optim.SGD([torch.ones(1)]))
    engine = zero_optimizer("DeepSpeedEngine", optimizer=other, module=None)
    for source in (other, engine):
        with pytest.raises(UsageError, match="without ZeRO.*got FP16_Optimizer"):
            memory.attribute(source)


# The attributes that are read of ZeRO optimizers, by class: of stage 1 or 2, and of stage 3.
STAGES: dict[str, dict[str, Any]] = {
    "DeepSpeedZeroOptimizer": {
        "optimizer": None,
        "single_partition_of_fp32_groups": [],
        "cpu_offload": True,
        "param_buffer_of_bit16_for_cpu_offload_groups": [],
        "temp_grad_buffer_for_cpu_offload": [],
        "accumulated_grads_in_cpu": {},
    },
    "DeepSpeedZeroOptimizer_Stage3": {
        "optimizer": None,
        "swap_optimizer": False,
        "params_in_nvme_and_cpu": False,
        "fp32_partitioned_groups_flat": [],
        "grad_partitions_flat_buffer": torch.empty(0),
        "offload_param": True,
        "fp16_partitioned_groups_flat": [],
        "module": torch.nn.Identity(),
        "ipg_buckets": {},
    },
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_unknown_version_is_refused_by_the_missing_attribute(stage: str) -> None:
    assert not memory.attribute(zero_optimizer(stage, **STAGES[stage])).params
    # Without `optimizer` the object would not count as DeepSpeed's.
    for missing in STAGES[stage].keys() - {"optimizer"}:
        known = {name: value for name, value in STAGES[stage].items() if name != missing}
        with pytest.raises(UsageError, match=f"{stage} has no '{missing}'"):
            memory.attribute(zero_optimizer(stage, **known))


@pytest.mark.parametrize("moved", ["swap_optimizer", "params_in_nvme_and_cpu"])
def test_zero_3_on_nvme_is_refused(moved: str) -> None:
    stage = "DeepSpeedZeroOptimizer_Stage3"
    with pytest.raises(UsageError, match="on NVMe.*got nvme"):
        memory.attribute(zero_optimizer(stage, **(STAGES[stage] | {moved: True})))


# ---- peaks


def test_copies_of_ended_children_stay_in_the_peaks() -> None:
    master, moments = torch.ones(NUMEL), torch.ones(NUMEL)
    with memory.attribute({"master": master}, {"moments": moments}, interval_s=0.01) as peaks:
        for tensor in (master, moments):
            with living_children(2):
                tensor.mul_(2)
                # The sample in progress may have begun before the write: wait for the next one.
                seen = peaks.samples + 1
                deadline = time.monotonic() + 60
                while peaks.samples <= seen and time.monotonic() < deadline:
                    time.sleep(0.01)
    now = memory.attribute({"master": master}, {"moments": moments})
    assert now.forked == now["master"].copied_bytes == now["moments"].copied_bytes == 0
    for name in ("master", "moments"):
        assert peaks[name].held_bytes == near(SIZE)
        assert peaks[name].copied_bytes == near(SIZE)
    assert SIZE <= peaks.copied_bytes < 2 * SIZE  # the two copies never existed together
    assert peaks.largest.forked == 2 and peaks.document["copied_bytes"] == peaks.copied_bytes
    assert "master                         16.0                 16.0" in peaks.text()


class Looked:
    """A source that notes how far the main thread counts while another thread reads it."""

    def __init__(self) -> None:
        self.count = 0
        self.progress: list[int] = []

    def holdings(self) -> Iterator[tuple[str, str, Any]]:
        if threading.current_thread() is not threading.main_thread():
            before = self.count
            time.sleep(0.002)
            self.progress.append(self.count - before)
        yield "master", "tensor", TENSOR


TENSOR = torch.ones(NUMEL)


def test_tensors_are_looked_up_while_the_main_thread_is_paused() -> None:
    """A backward that is in flight there replaces gradients without the GIL: another thread that
    read them ended the program by SIGSEGV. While a call of C delays the main thread, samples use
    the last places; children that are forked then do not run what it has still to run."""
    source = Looked()
    with memory.attribute(source, interval_s=0.001) as peaks:
        with living_children(1):
            time.sleep(0.3)  # in C
            assert peaks.samples > 1
        deadline = time.monotonic() + 60
        while len(source.progress) < 4 and time.monotonic() < deadline:
            source.count += 1
    assert {*source.progress} == {0} and len(source.progress) >= 4
    assert peaks["master"].held_bytes == near(SIZE)


def test_a_signal_during_a_look_up_reaches_the_program() -> None:
    class Interrupting(Looked):
        def holdings(self) -> Iterator[tuple[str, str, Any]]:
            yield from super().holdings()
            if len(self.progress) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    source = Interrupting()
    deadline = time.monotonic() + 60
    with pytest.raises(KeyboardInterrupt), memory.attribute(source, interval_s=0.001):
        while time.monotonic() < deadline:
            source.count += 1
    assert {*source.progress} == {0}


def test_a_pause_that_nobody_ends_is_short() -> None:
    """As while a source waits for a lock that the main thread has."""
    pause, has_begun = MainThreadPause(5), []
    thread = threading.Thread(target=lambda: has_begun.append(pause.begin(60)))
    thread.start()
    while not has_begun:
        pass
    thread.join()
    assert has_begun == [True]


def test_a_sample_on_request_is_kept() -> None:
    master = torch.ones(NUMEL)
    with memory.attribute({"master": master}, interval_s=3600) as peaks:
        with living_children(1):
            master.mul_(2)
            assert peaks.sample()["master"].copied_bytes == near(SIZE)
    assert peaks.samples == 3  # at the begin, on request, at the end
    assert peaks["master"].copied_bytes == near(SIZE) and peaks["none"].copied_bytes == 0


def test_sources_of_peaks_are_checked_before_the_block_runs() -> None:
    with (
        pytest.raises(UsageError, match="a source of unknown kind"),
        memory.attribute(3, interval_s=1),
    ):
        pytest.fail("the block ran")


def test_an_error_of_a_later_sample_is_raised_at_the_end() -> None:
    sources: dict[str, Any] = {"master": torch.ones(NUMEL)}
    with pytest.raises(UsageError, match="a source of unknown kind"):
        with memory.attribute(sources, interval_s=0.01):
            sources["other"] = 3  # `attribute` looks up the sources again for each sample
            deadline = time.monotonic() + 60
            names = {thread.name for thread in threading.enumerate()}
            while "modicum-peaks" in names and time.monotonic() < deadline:
                time.sleep(0.01)
                names = {thread.name for thread in threading.enumerate()}
            del sources["other"]


# ---- protection


def test_protected_pages_are_not_copied_until_the_protection_is_undone() -> None:
    buffer = torch.ones(NUMEL)

    def copied() -> int:
        """The bytes that are copied if `buffer` is overwritten while children exist."""
        with living_children(2) as pids:
            before = pss_anon([os.getpid(), *pids])
            buffer.mul_(2)
            after = pss_anon([os.getpid(), *pids])
            assert memory.attribute({"b": buffer})["b"].copied_bytes == pytest.approx(
                after - before, abs=MIB
            )
        return after - before

    assert copied() == pytest.approx(SIZE, abs=MIB)
    protection = modicum.torch.protect(buffer)
    assert protection.bytes + protection.left_bytes == SIZE
    assert 0 < protection.left_bytes < EDGE  # the first page holds malloc's header, too
    assert copied() < MIB
    protection.undo()
    assert protection.bytes == 0
    assert copied() == pytest.approx(SIZE, abs=MIB)


def test_unprotected_small_tensors_are_reported() -> None:
    small = torch.ones(100)
    protection = modicum.torch.protect({"gradient": small})
    assert (protection.bytes, protection.left_bytes) == (0, 400)
    assert "gradient" in str(protection)


def test_allocations_of_the_first_step_are_protected() -> None:
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.ones(NUMEL)
    protection = modicum.torch.protect(optimizer)
    assert protection.bytes == pytest.approx(SIZE, abs=EDGE)
    optimizer.step()
    assert protection.bytes == pytest.approx(3 * SIZE, abs=3 * EDGE)
    with living_children(2):
        optimizer.step()
        who = memory.attribute(optimizer)
    assert who["moments"].copied_bytes + who["gradient"].copied_bytes <= 3 * EDGE
    assert who["weights"].copied_bytes == near(SIZE)  # never protected: children may read them
    protection._renew()
    assert protection.bytes == pytest.approx(3 * SIZE, abs=3 * EDGE)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_optimizer_is_protected_before_its_first_step(is_wrapped: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    optimizer = source = torch.optim.AdamW([parameter], foreach=False)
    if is_wrapped:
        accelerate = pytest.importorskip("accelerate")
        source = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    protection = modicum.torch.protect(source)
    assert protection.bytes == 0
    parameter.grad = torch.ones(NUMEL)
    optimizer.step()
    assert protection.bytes == pytest.approx(3 * SIZE, abs=3 * EDGE)


def test_a_refused_protection_leaves_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    parameter.grad = torch.ones(NUMEL)
    optimizer = torch.optim.AdamW([parameter])
    with pytest.raises(UsageError, match="a source of unknown kind"):
        modicum.torch.protect(optimizer, 3)
    assert not optimizer._optimizer_step_post_hooks
    with living_children(1):
        parameter.grad.mul_(2)
        assert memory.attribute(optimizer)["gradient"].copied_bytes == near(SIZE)


def test_our_own_optimizer_is_already_protected() -> None:
    optimizer = modicum.torch.AdamW([torch.nn.Parameter(torch.ones(NUMEL))])
    modicum.torch.protect(optimizer).undo()  # has no effect on our own optimizer
    with living_children(2):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(NUMEL)
        optimizer.step()
        assert memory.attribute(optimizer)["moments"].copied_bytes == 0


def test_sources_without_host_memory_are_refused() -> None:
    for nothing in ([], torch.nn.Linear(9, 9), torch.empty(9, device="meta")):
        with pytest.raises(UsageError, match="nothing in host memory to protect"):
            modicum.torch.protect(nothing)


# Tensors in malloc's heap are protected and freed. The heap stays mapped, and malloc uses it again:
# children must then inherit it. Four children report: UsageError of a torch function (exit 7); the
# signal of an access that bypasses torch; whether a child can free the tensors that it lacks and
# allocate others; whether a child inherits new tensors at the freed addresses.
FREED = """
import ctypes, os, torch, modicum.torch
held = [torch.ones(16384) for _ in range(64)]  # small enough for the heap
kept = torch.ones(16)
protection = modicum.torch.protect(held)
assert protection.bytes > 1 << 20, protection.bytes
addresses = {tensor.data_ptr() for tensor in held}
address = held[0].data_ptr()
child = os.fork()
if child == 0:
    try:
        held[0].sum()
    except modicum.UsageError:
        pass
    else:
        os._exit(1)
    os._exit(7)
told = os.WEXITSTATUS(os.waitpid(child, 0)[1])
child = os.fork()
if child == 0:
    ctypes.string_at(address + 8192, 8)
    os._exit(0)
died = os.waitpid(child, 0)[1]
child = os.fork()
if child == 0:
    del held
    own = [torch.full((16384,), 3.0) for _ in range(64)]
    os._exit(0 if all(tensor.sum() == 3 * 16384 for tensor in own) else 1)
freed = os.waitpid(child, 0)[1]
del held
again = [torch.ones(16384) for _ in range(64)]
assert addresses & {tensor.data_ptr() for tensor in again}, "malloc has not reused the freed memory"
child = os.fork()
if child == 0:
    os._exit(0 if all(tensor.sum() == 16384 for tensor in again) else 1)
print(told, os.WTERMSIG(died), freed, os.waitpid(child, 0)[1])
"""


def test_freed_memory_is_inherited_again() -> None:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 25)}  # below it: the heap
    done = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", str(int(signal.SIGSEGV)), "0", "0"]


def test_modicum_imports_no_deepspeed() -> None:
    code = "import sys, modicum.torch\nassert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
