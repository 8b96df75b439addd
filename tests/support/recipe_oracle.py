"""Parts of the recipe oracle: the evaluation of nodes by numpy, stored tensors whose elements are
their ids, and a model of named parameters only, into which transformers loads them."""

import itertools
import re
import re._constants as sre
import re._parser as sre_parser
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import conversion_mapping as mapping_module
from transformers import core_model_loading as upstream
from transformers.modeling_utils import LoadStateDictConfig

Shape = tuple[int, ...]
BASE = "model"
HEADS = 3


def evaluate(node: dict[str, Any], stored: dict[str, np.ndarray]) -> np.ndarray:
    """A node's elements: an independent reading of docs/reference/recipes.md."""
    if node["op"] == "stored":
        return stored[node["name"]]
    parts = [evaluate(part, stored) for part in node["in"]]
    if node["op"] == "cat":
        return np.concatenate(parts, node["dim"])
    if node["op"] == "stack":
        return np.stack(parts, node["dim"])
    (part,) = parts
    if node["op"] == "slice":
        return part.take(range(node["start"], node["stop"]), node["dim"])
    if node["op"] == "permute":
        return part.transpose(node["dims"])
    if node["op"] == "gather":
        return part.take(node["index"], node["dim"])
    assert node["op"] == "reshape", node["op"]
    return part.reshape(node["shape"])


def skeleton(node: dict[str, Any]) -> str:
    """The form of a node: its ops and dims, without other numbers. If several inputs have the same
    form, it is shown once."""
    if node["op"] == "stored":
        return "stored"
    inside = " ".join(dict.fromkeys(skeleton(part) for part in node["in"]))
    dims = node.get("dim", node.get("dims", ""))
    return f"{node['op']}{f' {dims}' if dims != '' else ''} ({inside})"


# ---- the installed mapping


def mapping() -> dict[str, list[Any]]:
    """Every lookup key with its transforms, newly made."""
    return mapping_module._build_checkpoint_conversion_mapping()


def converters_of(transforms: Sequence[Any]) -> list[Any]:
    return [t for t in transforms if isinstance(t, upstream.WeightConverter)]


def settings_of(op: Any) -> str:
    """`Name(setting=value, ...)`, without settings that are off."""
    told = ", ".join(
        f"{name}={' '.join(value) if isinstance(value, list) else value}"
        for name, value in vars(op).items()
        if value is not None
        and value is not False
        and not isinstance(value, upstream.ConversionOps)
    )
    return f"{type(op).__name__}({told})"


def chain_of(converter: Any) -> str:
    """The name of a converter's chain of operations, as the table of conversions has it."""
    ops = " + ".join(settings_of(op) for op in converter.operations)
    return f"{ops} {len(converter.source_patterns)}:{len(converter.target_patterns)}"


# ---- names that patterns match


def sample_of(pattern: str) -> str:
    """A text that a regular expression matches, ignoring its assertions."""

    def text(item: tuple[Any, Any]) -> str:
        op, value = item
        if op is sre.LITERAL:
            return chr(value)
        if op is sre.ANY:
            return "a"
        if op is sre.IN:
            kind, first = value[0]
            if kind is sre.CATEGORY:
                return "1" if first is sre.CATEGORY_DIGIT else "w"
            return chr(first[0]) if kind is sre.RANGE else chr(first) if first else "z"
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, _, what = value
            return "".join(map(text, what)) * max(low, 1)
        if op is sre.SUBPATTERN:
            return "".join(map(text, value[3]))
        if op is sre.BRANCH:
            return "".join(map(text, value[1][0]))
        assert op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT), op
        return ""

    return "".join(map(text, sre_parser.parse(pattern)))


def renamed(name: str, transforms: Sequence[Any]) -> tuple[str, str | None]:
    """transformers' own renaming of one name: (new name, the pattern of the converter that takes
    it, or None). The transforms are reset first, since some remember the names that they have
    renamed."""
    for transform in transforms:
        if isinstance(transform, upstream.GroupWeightRename):
            transform._active = None
    renamings = [t for t in transforms if isinstance(t, upstream.WeightRenaming)]
    return upstream.rename_source_key(name, renamings, converters_of(transforms))


BEFORE = ("model.layers.2", "model.layers.10", "layers.2", "model", "x", "model.x.2")
BEFORE = (*BEFORE, *(f"{before}." for before in BEFORE), "")
AFTER = ("", ".weight", "weight", ".2.weight", ".2.norm.weight", "_2.weight", "x")


def names_for(transform: Any, pattern_index: int) -> Iterator[str]:
    """Names that one pattern of a transform matches, whatever other transforms do to them."""
    pattern = transform.source_patterns[pattern_index]
    body = sample_of(pattern.replace("*.", r".*\."))
    for before, after in itertools.product(BEFORE, AFTER):
        name = before + body + after
        match = transform.compiled_sources.search(name)
        if match is not None and match.group(f"g{pattern_index}") is not None:
            yield name


def source_names(
    converter: Any, transforms: Sequence[Any], experts: int
) -> Iterator[dict[str, list[str]]]:
    """Stored names for each pattern of a converter, for a few places in a model: only those that
    reach this converter after all renamings."""
    for before in BEFORE:
        for after in ("", ".weight", "weight", ".bias"):
            names: dict[str, list[str]] = {}
            for pattern in converter.source_patterns:
                plain = pattern.replace("\\", "").removeprefix("^")
                count = experts if "*" in plain else 1
                names[pattern] = [before + plain.replace("*", str(i)) + after for i in range(count)]
            every = [(name, pattern) for pattern, listed in names.items() for name in listed]
            if all(renamed(name, transforms)[1] == pattern for name, pattern in every):
                yield names


# ---- shapes


def shapes_of(converter: Any, size: int) -> tuple[int, list[Shape], list[Shape] | None]:
    """The number of tensors that a `*` matches, the shape under each source pattern, and the shapes
    of the model's targets where an operation asks for them. `size` is 0, 1 or 2; the shapes are as
    uneven as the operations permit."""
    kinds = [type(op).__name__ for op in converter.operations]
    sources, targets = len(converter.source_patterns), len(converter.target_patterns)
    rows, columns = ((5, 7), (1, 4), (8, 3))[size]
    experts = (11, 2, 5)[size]
    if kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
        return experts, [(rows + i, columns) for i in range(sources)], None
    if kinds == ["ErnieFuseAndSplitTextVisionExperts"]:
        return experts, [(rows + i, columns) for i in range(sources)], None
    if kinds == ["Concatenate"]:
        dim = converter.operations[0].dim
        shapes = [[3, 4, columns] for _ in range(sources)]
        for i, shape in enumerate(shapes):
            shape[dim] = rows + i
        return experts, [tuple(shape) for shape in shapes], None
    if kinds == ["Chunk"]:
        # By `size`, the last chunk is short by one, by as much as it can be, and not at all.
        each = (3, 2 * targets, 2)[size]
        total = each * targets - (1, targets - 1, 0)[size]
        return 1, [((total, columns), (total,), (total, 2, columns))[size]], None
    if kinds == ["Chunk", "PermuteForRope"]:
        each = HEADS * 2 * (1, 2, 3)[size]
        return 1, [((each * 3 - 1, columns), (each * 3,), (each * 3 - 2, columns))[size]], None
    if kinds == ["PermuteForRope"]:
        each = HEADS * 2 * (1, 2, 3)[size]
        return 1, [((each, columns), (each,), (each, columns))[size]], None
    if kinds in (["Interleave"], ["Interleave", "Chunk"]):
        dim = converter.operations[0].dim
        shape = [4, columns, columns]
        shape[dim] = (6, 2, 10)[size]
        return 1, [tuple(shape[: 2 + dim])], None
    if kinds == ["Split"]:
        parts = [(6, 3, 2), (1, 1, 1), (4, 9, 1)][size]
        return 1, [(sum(parts), columns)], [(part, columns) for part in parts]
    assert kinds == ["Transpose"], f"no shapes for a chain of {kinds}: the oracle needs some"
    op = converter.operations[0]
    shape = (4, rows, columns)[: op.dim1 + 1] if size else (4, 5, 5)[: op.dim1 + 1]
    swapped = [*shape]
    swapped[op.dim0], swapped[op.dim1] = swapped[op.dim1], swapped[op.dim0]
    # With check_dims, by `size`: square, stored transposed, and stored as in the model.
    return 1, [shape], [tuple(swapped) if size == 1 else shape] if op.check_dims else None


def config() -> Any:
    """A config with the members that operations read."""
    vision = SimpleNamespace(num_attention_heads=HEADS)
    text = SimpleNamespace(num_attention_heads=HEADS, split_ngram_parts=2)
    return SimpleNamespace(
        num_attention_heads=HEADS, vision_config=vision, get_text_config=lambda: text
    )


# ---- a checkpoint of ids, and what transformers makes of it


@dataclass
class Ids:
    """Stored tensors with elements that no other element of the checkpoint equals."""

    tensors: dict[str, np.ndarray]
    next_id: int = 0

    def add(self, name: str, shape: Shape) -> None:
        count = int(np.prod(shape))
        self.tensors[name] = np.arange(self.next_id, self.next_id + count).reshape(shape)
        self.next_id += count

    def described(self) -> dict[str, tuple[str, Shape]]:
        return {name: ("int64", array.shape) for name, array in self.tensors.items()}


class Names(torch.nn.Module):
    """A model that consists of named parameters only."""

    base_model_prefix = BASE

    def __init__(self, shapes: dict[str, Shape], base_model_prefix: str = BASE) -> None:
        super().__init__()
        self.config = config()
        self.base_model_prefix = base_model_prefix
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module._modules[part] = torch.nn.Module()
                module = module._modules[part]
            empty = torch.empty(shape, dtype=torch.int64, device="meta")
            module._parameters[last] = torch.nn.Parameter(empty, requires_grad=False)


def target_shapes(transforms: Sequence[Any], ids: Ids, given: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes of the tensors that transformers would make of a checkpoint if the model had all
    of them."""
    fresh = deepcopy(list(transforms))
    renamings = [t for t in fresh if isinstance(t, upstream.WeightRenaming)]
    converters = converters_of(fresh)
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    groups: dict[str, Any] = {}
    shapes: dict[str, Shape] = {}
    for name in sorted(ids.tensors, key=upstream.dot_natural_key):
        target, pattern = upstream.rename_source_key(name, renamings, converters)
        if pattern is None:
            shapes.setdefault(target, ids.tensors[name].shape)
        else:
            group = groups.setdefault(target, deepcopy(by_pattern[pattern]))
            group.add_tensor(target, name, pattern, torch.from_numpy(ids.tensors[name]))
    model = Names(given)
    for target, group in groups.items():
        made = group.convert(target, model=model, config=model.config)
        for name, value in made.items():
            value = value[0] if isinstance(value, list) else value
            shapes[name] = tuple(value.shape)
    return shapes


@dataclass
class Loaded:
    """The result of transformers for a checkpoint."""

    tensors: dict[str, np.ndarray]
    missing: set[str]
    unexpected: set[str]
    errors: dict[str, str]
    unused_transforms: list[Any]


def load_upstream(transforms: Sequence[Any], ids: Ids, model: Names, **options: Any) -> Loaded:
    """`from_pretrained`'s own loop over the stored tensors. The transforms can't be used again."""
    load_config = LoadStateDictConfig(weight_mapping=list(transforms), dtype=torch.int64, **options)
    tensors = {name: torch.from_numpy(array) for name, array in ids.tensors.items()}
    info, _ = upstream.convert_and_load_state_dict_in_model(model, tensors, load_config)
    assert not info.mismatched_keys and not info.error_msgs, info
    values = {
        name: value.detach().numpy()
        for name, value in model.state_dict().items()
        if value.device.type != "meta"
    }
    unused = [t for t in transforms if not t.was_used()]
    return Loaded(values, info.missing_keys, info.unexpected_keys, info.conversion_errors, unused)


def checkpoint_for(transforms: Sequence[Any], size: int) -> tuple[Ids, dict[str, Shape], list[Any]]:
    """Stored tensors such that every transform of a list applies to one, the shapes that operations
    read from the model, and the converters for which no name was found."""
    ids = Ids({})
    given: dict[str, Shape] = {}
    taken: set[str] = set()
    unreached = []
    for converter in converters_of(transforms):
        experts, shapes, model_shapes = shapes_of(converter, size)
        places = list(source_names(converter, transforms, experts))
        if not places:
            unreached.append(converter)
        for names in places[:3]:
            first = renamed(next(iter(names.values()))[0], transforms)[0]
            patterns = converter.target_patterns
            targets = [first.replace(patterns[0], pattern) for pattern in patterns]
            if any(is_unfit(target, taken) for target in targets):
                continue
            taken.update(targets)
            for listed, shape in zip(names.values(), shapes, strict=True):
                for name in listed:
                    ids.add(name, shape)
            given |= dict(zip(targets, model_shapes or (), strict=False))
    for transform in transforms:
        if isinstance(transform, upstream.WeightConverter):
            continue
        for index in range(len(transform.source_patterns)):
            add_renamed(transform, index, transforms, ids, taken)
    return ids, given, unreached


def is_unfit(target: str, taken: set[str]) -> bool:
    """Whether no model can have this name: it is invalid, is taken, is a module's name, or would
    turn a parameter into a module."""
    return not re.fullmatch(r"\w+(\.\w+)*", target) or any(
        t == target or t.startswith(f"{target}.") or target.startswith(f"{t}.") for t in taken
    )


def add_renamed(
    transform: Any, index: int, transforms: Sequence[Any], ids: Ids, taken: set[str]
) -> None:
    """Adds to `ids` up to four stored tensors that a pattern of a renaming matches and that no
    converter takes."""
    added = 0
    for name in names_for(transform, index):
        target, pattern = renamed(name, transforms)
        if pattern is not None or is_unfit(target, taken) or name in ids.tensors:
            continue
        taken.add(target)
        ids.add(name, (2,))
        added += 1
        if added == 4:
            return
