"""Options of parameter groups, `extra` and `extra_per_rank` of a saved
checkpoint come back with their values and types, or the save refuses them by name; their damaged
texts are errors with a category. Optimizers without state tensors are saved and go on exactly.

The oracles are the values themselves, and the uninterrupted training. Catches: a list that comes
back as a tuple; an enum that is saved as its number; options that replace a group's parameters;
memory that is taken before a count is checked; numbers of a state without tensors that are lost; a
wrapper that hides the state of its optimizer; tensors of a resume in inference mode that can't be
trained.
"""

import json
import random
import re
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import torch.distributed.checkpoint as dcp  # noqa: E402  (after torch is known to be there)
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402

import modicum.torch as front  # noqa: E402
from modicum.errors import Error, IntegrityError, UsageError  # noqa: E402
from modicum.torch.dcp import ModicumReader, ModicumWriter  # noqa: E402
from modicum.torch.saving import extra, groups, planning, tensor_state  # noqa: E402
from modicum.torch.saving.state_dicts import facts_in  # noqa: E402
from modicum.torch.saving.values import LARGEST_BYTES  # noqa: E402

Through = Callable[[Any, Path], Any]


def optimizer_with(**options: Any) -> tuple[Any, dict[int, str]]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    return torch.optim.SGD([{"params": [parameter], **options}]), {id(parameter): "w"}


def through_options(value: Any, folder: Path) -> Any:
    text = groups.text_of(*optimizer_with(x=value))
    optimizer, names = optimizer_with()
    groups.restore(optimizer, json.loads(text), names)
    return optimizer.param_groups[0]["x"]


def through_extra(value: Any, folder: Path) -> Any:
    return extra.common_of(json.loads(extra.text_of({"x": value})))["x"]


def through_rank(value: Any, folder: Path) -> Any:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(extra.bytes_of({"x": value}))
    return extra.read(path.read_bytes(), path.name)["x"]


PLACES: dict[str, tuple[str, Through]] = {
    "options": ("optimizer.param_groups[0]['x']", through_options),
    "extra": ("extra['x']", through_extra),
    "per_rank": ("extra_per_rank['x']", through_rank),
}


def assert_same(value: Any, expected: Any) -> None:
    """Asserts equal values of equal types."""
    assert type(value) is type(expected)
    if isinstance(expected, (list, tuple)):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert {*map(repr, value)} == {*map(repr, expected)}
        for key in expected:
            assert_same(value[key], expected[key])
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert (value == expected).all()
    else:
        assert repr(value) == repr(expected)  # also -0.0 and NaN


VALUES = [
    None, True, -3, 1 << 90, 0.1, -0.0, float("nan"), float("-inf"), "ü\n\0\ud800", b"\0\xff",
    [], (), {}, [1, (2, [3.5])], (0.9, 0.999), {"a": [1], "b": {"c": (None,)}},
    {1: "a", "1": "b", None: 0, 2.5: 1}, Counter({3: 2, 5: 1}),
    {"__tuple__": [1], "x": 1}, {"__tensor__": "0"}, torch.bfloat16,
    torch.tensor(3.5), torch.arange(6).view(2, 3).t(), torch.zeros(0, 3), torch.tensor([True]),
    torch.ones(3, dtype=torch.bfloat16), np.arange(4, dtype=np.uint32), np.ones((2, 0)),
    np.array(1j), np.arange(6, dtype=">i2").reshape(2, 3),
]  # fmt: skip
NORMALISED = [
    (np.float32(0.1), float(np.float32(0.1))), (np.int64(3), 3), (np.bool_(True), True),
    (np.str_("a"), "a"), ({np.int64(3): np.float64(2)}, {3: 2.0}), (torch.Size([2]), (2,)),
    (OrderedDict(a=1), {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_values_come_back(place: str, tmp_path: Path) -> None:
    through = PLACES[place][1]
    for value, expected in [*((value, value) for value in VALUES), *NORMALISED]:
        assert_same(through(value, tmp_path), expected)


@pytest.mark.parametrize("place", PLACES)
def test_keys_are_sorted(place: str, tmp_path: Path) -> None:
    """Texts are not, except in `extra`, which is compared between ranks."""
    through = PLACES[place][1]
    expected = ["a", "b"] if place == "extra" else ["b", "a"]
    assert [*through({"b": 1, "a": 2}, tmp_path)] == expected
    assert [*through({2: 0, "x": 0, 1: 0}, tmp_path)] == ["x", 1, 2]
    assert type(through(defaultdict(list, {"a": [1]}), tmp_path)) is dict


class Number(IntEnum):
    ONE = 1


class Text(str, Enum):
    A = "a"


Named = namedtuple("Named", "a")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: list[tuple[str, Any, str]] = [
    ("set", {1}, "got set"), ("enum", Number.ONE, "got Number"), ("text", Text.A, "got Text"),
    ("named", Named(1), "got Named"), ("function", print, "builtin"), ("complex", 1j, "complex"),
    ("parameter", torch.nn.Parameter(torch.zeros(1)), "got Parameter"),
    ("meta", torch.zeros(1, device="meta"), "on meta"), ("int", 1 << 5000, "5001 bits"),
    ("array", np.zeros(LARGEST_BYTES + 1, np.uint8), f"got {LARGEST_BYTES + 1} bytes"),
    ("objects", np.array([print]), "dtype object"), ("key", {(1, 2): 3}, r"the key \(1, 2\)"),
    ("cycle", CYCLE, "at most 100 levels"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("value", "words"), [of[1:] for of in REFUSED], ids=[of[0] for of in REFUSED]
)
def test_a_value_that_would_not_come_back_is_named(
    place: str, value: Any, words: str, tmp_path: Path
) -> None:
    name, through = PLACES[place]
    at = r"\[0\]" * (words == "at most 100 levels")
    with pytest.raises(UsageError, match=f"UNSUPPORTED: {re.escape(name)}{at}.*{words}"):
        through(value, tmp_path)
    if not at:
        with pytest.raises(UsageError, match=re.escape(f"{name}['y'][1]")):
            through({"y": [0, value]}, tmp_path)


def test_a_large_tensor_is_for_extra_per_rank(tmp_path: Path) -> None:
    largest, larger = (torch.ones(LARGEST_BYTES + n, dtype=torch.uint8) for n in (0, 1))
    for name, through in PLACES.values():
        assert_same(through(largest, tmp_path), largest)
        if through is through_rank:
            assert_same(through(larger, tmp_path), larger)
        else:
            with pytest.raises(UsageError, match=re.escape(name) + ".*extra_per_rank"):
                through(larger, tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_random_generators_and_schedulers_go_on(place: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer_with()[0], [2, 3, 3])
    saved = PLACES[place][1](
        {
            "torch": torch.get_rng_state(), "random": random.getstate(),
            "numpy": np.random.get_state(), "generator": generator.bit_generator.state,
            "mt": np.random.MT19937(1).state, "scheduler": scheduler.state_dict(),
        },
        tmp_path,
    )  # fmt: skip

    def draw() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), np.random.rand(), generator.random()]

    expected = draw()
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["random"])
    np.random.set_state(saved["numpy"])
    generator.bit_generator.state = saved["generator"]
    assert draw() == expected
    np.random.MT19937().state = saved["mt"]
    scheduler.load_state_dict(saved["scheduler"])
    assert scheduler.milestones == Counter({3: 2, 2: 1})
    assert [*scheduler.milestones.elements()] == [2, 3, 3]


def test_modicum_0_1_reads_the_usual_options() -> None:
    """It reads "options" alone, and lists as tuples. Its own texts have no "exact"."""
    model = torch.nn.Linear(2, 2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float32(0.5))
    (group,) = json.loads(groups.text_of(optimizer, names))["groups"]
    assert group["options"]["betas"] == [0.9, 0.999] and group["options"]["lr"] == 0.5
    assert group["exact"] == {}
    del group["exact"]
    again = torch.optim.AdamW(model.parameters())
    groups.restore(again, {"groups": [group]}, names)
    assert again.param_groups[0]["betas"] == (0.9, 0.999) and again.param_groups[0]["lr"] == 0.5


def test_groups_without_parameters_keep_their_order() -> None:
    optimizer, names = optimizer_with(lr=1)
    for lr in (2, 3):
        optimizer.add_param_group({"params": [], "lr": lr})
    text = groups.text_of(optimizer, names)
    for group in optimizer.param_groups:
        group["lr"] = 0
    groups.restore(optimizer, json.loads(text), names)
    assert [group["lr"] for group in optimizer.param_groups] == [1, 2, 3]


# ---- whole checkpoints


class Small(torch.nn.Module):
    """A matrix, and a number: its state is numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def train_by(self, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (self.matrix * self.scale).square().sum().backward()
            optimizer.step()


Make = Callable[[Small], Any]


def saved(folder: Path, make: Make, steps: int) -> tuple[Small, Any]:
    """A model and its optimizer, saved as a checkpoint of folder / "root"."""
    model = Small()
    save_file(
        {name: of.detach() for name, of in model.named_parameters()}, folder / "a.safetensors"
    )
    front.load(model, folder / "a.safetensors", progress=False, budget="none")
    optimizer = make(model)
    model.train_by(optimizer, steps)
    front.save(model, folder / "root", step=np.int64(steps), optimizer=optimizer, budget="none")
    return model, optimizer


def assert_goes_on(folder: Path, make: Make, steps: int, *, in_inference: bool = False) -> None:
    """Asserts that two more steps of a resumed program are those of the program that saved."""
    model, optimizer = saved(folder, make, steps)
    with torch.device("meta"):
        again = Small()
    new = make(again)
    new.param_groups[0]["lr"] = 0.5
    with torch.inference_mode(in_inference):
        report = front.resume(again, folder / "root", optimizer=new, progress=False, budget="none")
    assert report.step == steps
    for one, by in ((model, optimizer), (again, new)):
        one.train_by(by, 2)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def only_scale(model: Small) -> Any:
    return torch.optim.AdamW([model.scale], lr=0.1)


MAKERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "numbers": only_scale,
    "modicum": lambda model: front.AdamW(model.named_parameters(), lr=0.1),
}


@pytest.mark.parametrize(
    ("kind", "steps"), [("sgd", 3), ("adamw", 0), ("numbers", 2), ("modicum", 0)]
)
def test_an_optimizer_without_state_tensors_goes_on(kind: str, steps: int, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, MAKERS[kind], steps)
    with pytest.raises(UsageError, match="MISMATCH|UNSUPPORTED"):
        other = Small()
        front.resume(other, tmp_path / "root", optimizer=torch.optim.Adagrad(other.parameters()))


def test_dcp_saves_an_optimizer_without_state_tensors(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, MAKERS["sgd"], 1)
    optimizer.param_groups[0] |= {"lr": 0.25, "rates": [1, (np.float32(2),)]}
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    writer = ModicumWriter(tmp_path / "root", step=2, model=model, optimizer=optimizer)
    dcp.save(state | {"epoch": {1: (2, float("inf"))}}, storage_writer=writer)
    read = {"model": Small().state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    read["optim"]["param_groups"][0]["lr"] = 0.0
    dcp.load(read, storage_reader=ModicumReader(tmp_path / "root"))
    assert read["optim"]["param_groups"][0]["lr"] == 0.25
    again = Small()
    new = MAKERS["sgd"](again)
    front.resume(again, tmp_path / "root", optimizer=new, progress=False, budget="none")
    assert new.param_groups[0]["lr"] == 0.25 and new.param_groups[0]["rates"] == [1, (2.0,)]
    assert torch.equal(again.matrix, model.matrix)


def test_a_checkpoint_of_modicum_0_1_without_state_json_is_resumed(tmp_path: Path) -> None:
    """Trainer's checkpoints have groups.json alone for an optimizer without state tensors."""
    with patch.object(planning, "state_of", lambda *_: None):
        assert_goes_on(tmp_path, MAKERS["sgd"], 1)
    assert not (tmp_path / "root/step-1/optimizer/state.json").exists()


@pytest.mark.parametrize("kind", ["adamw", "modicum", "sgd"])
def test_a_resume_in_inference_mode_can_be_trained(kind: str, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, MAKERS[kind], 2, in_inference=True)
    with torch.inference_mode():
        model = Small()
        with pytest.raises(UsageError, match="UNSUPPORTED: .* made in inference mode"):
            front.resume(model, tmp_path / "root", optimizer=MAKERS[kind](model))


class Hiding(torch.optim.Optimizer):
    """A wrapper whose `state` is not that of the optimizer inside, as ZeroRedundancyOptimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optim = inner

    def step(self, closure: Any = None) -> None:
        self.optim.step()


def test_a_wrapper_that_hides_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UNSUPPORTED: a wrapper that hides .* got Hiding"):
        saved(tmp_path, lambda model: Hiding(MAKERS["adamw"](model)), 1)
    assert_goes_on(tmp_path, lambda model: Hiding(MAKERS["sgd"](model)), 1)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, MAKERS["sgd"], 1)
    calls: list[Callable[[], object]] = [
        partial(front.save, model, "", step=2),
        partial(front.resume, model, ""),
        partial(ModicumWriter, "", step=2),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="USAGE: run"):
            call()
    for size in (0, "0"):
        with pytest.raises(UsageError, match="USAGE: shard_size"):
            front.save(model, tmp_path / "root", step=2, options=front.SaveOptions(shard_size=size))
    for step in (np.bool_(True), 2.0, "2"):
        with pytest.raises(UsageError, match="USAGE: step"):
            front.save(model, tmp_path / "root", step=step)


# ---- damaged texts


def test_options_do_not_replace_parameters() -> None:
    optimizer, names = optimizer_with()
    for kind in ("options", "exact"):
        group = {"params": ["w"], "options": {}, "exact": {}}
        group[kind] = {"lr": 1, "params": []}
        with pytest.raises(IntegrityError, match=r"optimizer/groups\.json"):
            groups.restore(optimizer, {"groups": [group]}, names)
    assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "number", [["float32", 1.0, [10**8]], ["load", 1.0, []], ["float32", 1.0, ["1"]], {"a": 1}, [1]]
)
def test_numbers_of_a_state_take_no_memory(number: Any) -> None:
    text = tensor_state.text("torch.AdamW", {"w": {"step": number}})
    with pytest.raises(IntegrityError, match=r"optimizer/state\.json"):
        tensor_state.numbers_of(text)


HOSTILE = [
    None, True, -1, 1e300, float("nan"), 10**30, "", "w", "params", "load", [], {}, [[]], [10**8],
    ["float32", 1.0, [10**8]], ["float32", "a", []], ["int8", 1e9, []], ["load", 1, []],
    {"__tuple__": 3}, {"__dict__": [[1]]}, {"__dict__": [[[], 1]]}, {"__counter__": {"a": 1}},
    {"__bytes__": "a"}, {"__dtype__": "load"}, {"__tensor__": "9"}, {"__tensor__": 1},
    {"__tensor__": {"dtype": "uint8", "shape": [10**10], "data": ""}},
    {"__tensor__": {"dtype": "qint8", "shape": [0, 10**30], "data": ""}},
    {"__array__": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
    {"__array__": {"dtype": "<f8", "shape": [0] * 99, "data": ""}},
    json.loads("[" * 200 + "]" * 200),
]  # fmt: skip


def mutated(draw: random.Random, text: str) -> str:
    """The text with a part replaced by a hostile value, or with other characters."""
    if draw.random() < 0.2:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice(["", "[", "}", '"', "\\u12", "9" * 5000]) + text[at + 1 :]
    document = json.loads(text)
    node, places = document, []
    while isinstance(node, (dict, list)) and node and (not places or draw.random() < 0.8):
        key = draw.choice([*node]) if isinstance(node, dict) else draw.randrange(len(node))
        places.append((node, key))
        node = node[key]
    of, key = places[-1]
    if isinstance(of, dict) and draw.random() < 0.3:
        of[draw.choice(["params", "x", "__tuple__"])] = of.pop(key)
    else:
        of[key] = draw.choice(HOSTILE)
    return json.dumps(document)


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_mutated_texts_are_read_or_have_a_category(count: int) -> None:
    draw = random.Random(count)
    values = {str(at): value for at, value in enumerate(VALUES)}
    optimizer, names = optimizer_with(foreach=[1], **{f"o{at}": of for at, of in values.items()})
    (parameter,) = optimizer.param_groups[0]["params"]
    facts = {"dcp": {"model": ["model"], "values": values, "optim": ["optim", 0], "flat": True,
                     "param_groups": [{"params": ["w"], "lr": 0.1, "betas": (1, 2)}]}}  # fmt: skip
    numbers = {"w": {"step": ["float32", 3.0, []], "n": 1, "c": ["int64", 1, [1, 1]]}}
    encoded = extra.bytes_of(values)
    inner = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])

    def read_rank(text: str) -> None:
        header = inner | {"__metadata__": {"extra": text}}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        data = encoded[8 + int.from_bytes(encoded[:8], "little") :]
        extra.read(len(head).to_bytes(8, "little") + head + data, "rank-00000.safetensors")

    def read_state(text: str) -> None:
        tensor_state.numbers_of(text)
        tensor_state.require_kind(optimizer, text)

    readers: list[tuple[str, Callable[[str], object]]] = [
        (groups.text_of(optimizer, names),
         lambda text: groups.restore(optimizer, parsed(text), names)),
        (extra.text_of(facts), lambda text: facts_in(extra.common_of(parsed(text)), "extra.json")),
        (tensor_state.text("torch.SGD", numbers), read_state),
        (inner["__metadata__"]["extra"], read_rank),
    ]  # fmt: skip
    for at in range(count):
        text, read = readers[at % len(readers)]
        with suppress(Error):
            read(mutated(draw, text))
        assert optimizer.param_groups[0]["params"][0] is parameter


def parsed(text: str) -> Any:
    """The document, as `json_in` gives it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
