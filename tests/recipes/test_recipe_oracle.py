"""Compares transformers' conversions with the index maps that `modicum.recipes` makes from the same
conversion mapping. The elements of the stored tensors are distinct integers, their ids, so that a
converted tensor shows which stored element each of its elements is.

Catches: an operation that is translated wrongly, an order of experts or a match of names that
differs from transformers'.
"""

import importlib
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from program import run_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import recipe_oracle as oracle  # noqa: E402
from recipe_oracle import Ids, Names, evaluate, upstream  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

import modicum as front  # noqa: E402
from modicum._modicum import RecipeBuilder  # noqa: E402
from modicum.recipes import Recipe, translation  # noqa: E402
from modicum.recipes.nodes import stored  # noqa: E402
from modicum.recipes.operations import (  # noqa: E402
    OPERATIONS,
    Chain,
    nodes_of,
)

GOLDEN = "tests/golden/operations.txt"


def fresh(key: str) -> list[Any]:
    """The transforms of a key of the mapping, newly made: a load by transformers changes them."""
    return oracle.mapping_module.get_checkpoint_conversion_mapping(key)


def translated(transforms: Sequence[Any], ids: Ids, model: Names) -> translation.Translation:
    """Modicum's translation of these transforms, for a checkpoint of ids and a model."""
    targets = {n: ("int64", tuple(t.shape)) for n, t in model.state_dict().items()}
    return translation.translate(
        transforms,
        ids.described(),
        targets,
        config=model.config,
        base_model_prefix=model.base_model_prefix,
    )


def compare(ours: translation.Translation, theirs: oracle.Loaded, ids: Ids) -> int:
    """Asserts that both have the same tensors with the same elements. Returns how many."""
    assert theirs.errors == {}
    assert ours.arrays.keys() == theirs.tensors.keys()
    for name, array in ours.arrays.items():
        values = evaluate(array.node, ids.tensors)
        assert array.shape == values.shape, name
        assert np.array_equal(values, theirs.tensors[name]), f"{name} is {array.node}"
    assert {name for names in ours.unexpected.values() for name in names} == theirs.unexpected
    assert ours.doubled == {} and ours.dropped == []
    return len(ours.arrays)


# ---- every key of the installed mapping


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["awkward", "smallest", "larger"])
def size(request: pytest.FixtureRequest) -> int:
    """The argument `size` of the oracle's `shapes_of`; "awkward" are its uneven shapes."""
    return request.param


def test_each_key_of_the_mapping_is_translated_as_transformers_converts(size: int) -> None:
    compared, converters, skipped = 0, 0, 0
    never_used = {}
    keys = sorted(oracle.mapping())
    for key in keys:
        ids, given, unreached = oracle.checkpoint_for(fresh(key), size)
        skipped += len(unreached)
        model = Names(oracle.target_shapes(fresh(key), ids, given))
        theirs = oracle.load_upstream(fresh(key), ids, model)
        compared += compare(translated(fresh(key), ids, model), theirs, ids)
        converters += len(oracle.converters_of(fresh(key)))
        if theirs.unused_transforms:
            never_used[key] = [t.source_patterns for t in theirs.unused_transforms]
    print(f"{len(keys)} keys, {converters} converters, {compared} tensors, {skipped} skipped")
    assert (len(keys), converters, skipped) == (251, 171, 0)
    assert compared > 3000
    # minimax_m2: the renaming before the unused one has the same effect. pi0: two renamings give
    # names below `model.dit` and `model.vlm`. These two are parameters of the oracle's model, so no
    # parameter can be below them.
    assert never_used.keys() <= {"minimax_m2", "pi0"}, never_used


# ---- the table


SPLIT = [(6, 5), (3, 5), (2, 5)]  # the targets' shapes for Split, which reads them from the model


def synthetic() -> dict[str, tuple[Any, list[oracle.Shape]]]:
    """Converters for operations that no entry of the mapping uses, each with the shapes of its
    sources. The keys are the texts of `chain_of`."""
    experts = "e.*.gate.w", "e.*.up.w"
    q, k, v = names = ["q_proj.w", "k_proj.w", "v_proj.w"]
    rope = {"dim": 0, "permute_layer_names": ["q_proj", "k_proj"]}
    heads = oracle.HEADS * 2
    rows = [
        ("all.w", "e.*.w", [upstream.SplitModulelist(dim=0)], [(3, 5, 2)]),
        ("a.w", "b.w", [upstream.Interleave(dim=0, inverse=True)], [(6, 5)]),
        ("a.w", "b.w", [upstream.PermuteForRope(inverse=True)], [(heads * 2, 5)]),
        ("a.w", "b.w", [upstream.Conv3dToLinear(3, (2, 5, 4))], [(7, 3, 2, 5, 4)]),
        ("a.w", "b.w", [upstream.LinearToConv3d(3, (2, 5, 4))], [(7, 120)]),
        ("a.w", "a.w", [upstream._IdentityOp()], [(7, 5)]),
        ("qkv.w", names, [upstream.VisionUnfuseAndPermuteForRope(**rope)], [(heads * 3 - 1, 5)]),
        ([q, k, v], "qkv.w", [upstream.VisionFuseAndPermuteForRope(**rope)],
         [(heads, 5), (heads * 2, 5), (4, 5)]),
        (["t.gate_up", "v.gate_up"], list(experts),
         [upstream.ErnieSplitAndDecoupleTextVisionExperts()], [(3, 4, 5), (2, 4, 5)]),
        ("parts.w", "part_*.w", [upstream.Chunk(0, "split_ngram_parts")], [(7, 5)]),
        ("emb.w", names, [upstream.Split(dim=0)], [(11, 5)]),
    ]  # fmt: skip
    made = {}
    for sources, targets, operations, shapes in rows:
        converter = upstream.WeightConverter(sources, targets, operations)
        made[oracle.chain_of(converter)] = (converter, shapes)
    return made


def asked_alone(converter: Any, shapes: list[oracle.Shape]) -> tuple[Ids, dict[str, Any]]:
    """Sources of a converter, filled with ids, and the nodes that Modicum makes of them for the
    converter's only operation, by target. No model is involved."""
    ids = Ids({})
    inputs: Any = {}
    shapes_of = dict(zip(converter.source_patterns, shapes, strict=True))
    builder = RecipeBuilder({source: ("int64", shape) for source, shape in shapes_of.items()})
    for source, shape in shapes_of.items():
        ids.add(source, shape)
        inputs[source] = [stored(source, builder)]
    (operation,) = converter.operations
    targets = converter.target_patterns
    sizes = dict(zip(targets, SPLIT, strict=False))  # of `synthetic`, only Split reads them
    chain = Chain(converter.source_patterns, targets, targets[0], sizes, oracle.config())
    return ids, nodes_of(operation, inputs, chain)


@pytest.mark.parametrize("chain", sorted(synthetic()))
def test_operations_that_no_model_uses_are_translated_too(chain: str) -> None:
    converter, shapes = synthetic()[chain]
    ids, ours = asked_alone(converter, shapes)
    targets = converter.target_patterns
    theirs = converter.operations[0].convert(
        {name: [torch.from_numpy(array)] for name, array in ids.tensors.items()},
        source_patterns=converter.source_patterns,
        target_patterns=targets,
        full_layer_name=targets[0],
        model=Names(dict(zip(targets, SPLIT, strict=False))) if "Split(" in chain else None,
        config=oracle.config(),
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        value = value[0] if isinstance(value, list) else value
        array = ours[name][0] if isinstance(ours[name], list) else ours[name]
        assert array.shape == value.shape
        assert np.array_equal(evaluate(array.node, ids.tensors), value.numpy())


def rows_of_the_mapping() -> dict[str, tuple[set[str], set[str]]]:
    """For each chain of operations: the keys of the mapping that have it, and the `skeleton`s of
    the nodes that it becomes."""
    rows: dict[str, tuple[set[str], set[str]]] = {}
    for key in sorted(oracle.mapping()):
        for converter in oracle.converters_of(fresh(key)):
            keys, becomes = rows.setdefault(oracle.chain_of(converter), (set(), set()))
            keys.add(key)
            if len(keys) > 1:  # the first key's nodes suffice
                continue
            for size in range(3):
                ids, given, _ = oracle.checkpoint_for([converter], size)
                model = Names(oracle.target_shapes([converter], ids, given))
                made = translated([converter], ids, model).arrays.values()
                becomes.update(oracle.skeleton(array.node) for array in made)
    return rows


def table() -> str:
    """The text of GOLDEN: each chain of operations, and its nodes."""
    keys = oracle.mapping()
    converting = sum(1 for transforms in keys.values() if oracle.converters_of(transforms))
    lines = [
        "What each chain of transformers' conversion operations is in nodes of recipe.json.",
        f"transformers {transformers.__version__}: {len(keys)} keys, {converting} with converters.",
    ]
    for chain, (having, becomes) in sorted(rows_of_the_mapping().items()):
        some = " ".join(sorted(having)[:4]) + (" ..." if len(having) > 4 else "")
        lines += ["", *textwrap.wrap(chain, 96, subsequent_indent="    ")]
        lines += [f"  {len(having)} keys: {some}", *(f"    {node}" for node in sorted(becomes))]
    for chain, (converter, shapes) in sorted(synthetic().items()):
        made = asked_alone(converter, shapes)[1].values()
        made = [value[0] if isinstance(value, list) else value for value in made]
        nodes = sorted({oracle.skeleton(array.node) for array in made})
        lines += ["", *textwrap.wrap(chain, 96, subsequent_indent="    ")]
        lines += ["  no key: made up by the test", *(f"    {node}" for node in nodes)]
    return "\n".join(lines) + "\n"


def test_the_table_is_the_golden_one(root: Path) -> None:
    made = table()
    print(made)
    path = root / GOLDEN
    if not path.exists():
        path.write_text(made)
        pytest.fail(f"{GOLDEN} was missing and has been written; check it")
    assert path.read_text() == made, (
        f"{GOLDEN} is stale; if the change is intended, remove it and run again"
    )


def test_every_operation_of_the_core_is_in_the_table() -> None:
    """The core is transformers' core_model_loading. Of the operations of other modules, such as
    those of quantizations, only Fp8Dequantize is translated; the others are refused by name."""
    # Makes operations of other modules known, which must not count as the core's.
    importlib.import_module("transformers.quantizers.auto")
    found, classes = set(), [upstream.ConversionOps]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls is not upstream.ConversionOps:
            found.add((cls.__module__, cls.__name__))
    core = {name for module, name in found if module == upstream.__name__}
    former = {"Force16BytesAlignment"}  # of transformers 5.3
    assert core | former == OPERATIONS.keys() - {"Fp8Dequantize"}


class Concatenate(upstream.Concatenate):
    """Another class with the name of a known operation."""


class Widened(upstream.ConversionOps):
    """An operation that transformers does not have."""

    def convert(self, input_dict: Any, **_: Any) -> Any:
        return input_dict


def with_setting() -> Any:
    """A known operation with an attribute that the translation does not know."""
    operation = upstream.Chunk(0)
    operation.rounds_down = True
    return operation


@pytest.mark.parametrize(
    ("operation", "word"),
    [(Concatenate(0), "test_recipe_oracle.Concatenate"), (Widened(), "Widened"),
     (with_setting(), "rounds_down")],
)  # fmt: skip
def test_an_unknown_operation_is_refused_by_name(operation: Any, word: str) -> None:
    converter = upstream.WeightConverter("a.w", "b.w", [operation])
    ids = Ids({})
    ids.add("x.a.w", (4, 2))
    with pytest.raises(front.UsageError, match=word) as caught:
        translated([converter], ids, Names({"x.b.w": (4, 2)}))
    assert (caught.value.category, caught.value.tensor) == ("UNSUPPORTED", "x.b.w")


@pytest.mark.parametrize("end", ("", "$"), ids=("5.23", "5.12"))
def test_codes_of_experts_have_the_scales_of_either_pattern(end: str) -> None:
    """transformers 5.12 ends the patterns of weights and of their scales with `$`."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = f"experts.*.w.weight{end}", f"experts.*.w.weight_scale_inv{end}"
    described = {"codes": ("float8_e4m3fn", (4, 2)), "scales": ("float32", (1, 1))}
    builder = RecipeBuilder(described)
    inputs: Any = {weight: [stored("codes", builder)], scale: [stored("scales", builder)]}
    chain = Chain([weight, scale], ["experts.w"], "experts.w", {}, None)
    assert nodes_of(finegrained.Fp8Dequantize(None), inputs, chain) == {weight: inputs[weight]}
    assert chain.scales == inputs[scale]


# ---- matching of names


def loaded_by_both(
    names: Sequence[str], targets: dict[str, oracle.Shape], transforms: Sequence[Any]
) -> translation.Translation:
    """Loads a checkpoint of vectors with these names into a model with these targets, and asserts
    that Modicum's result equals transformers'."""
    ids = Ids({})
    for name in names:
        ids.add(name, (2,))
    theirs = oracle.load_upstream(deepcopy(list(transforms)), ids, Names(targets))
    ours = translated(transforms, ids, Names(targets))
    for name, array in ours.arrays.items():
        assert np.array_equal(evaluate(array.node, ids.tensors), theirs.tensors[name]), name
    assert ours.arrays.keys() == theirs.tensors.keys()
    assert {name for names in ours.unexpected.values() for name in names} == theirs.unexpected
    assert targets.keys() - ours.arrays.keys() == theirs.missing
    return ours


@pytest.mark.parametrize(
    ("names", "targets", "transforms"),
    [
        # The base model's prefix, "model", is added, removed, or neither.
        (["a.w", "model.b.w", "c.w", "model.d.w"], ["model.a.w", "b.w", "c.w", "model.d.w"], []),
        # After the prefix, transformers accepts any character, not only a dot.
        (["modelxa.w", "models.b.w"], ["a.w"], []),
        # A renaming to a name that the model lacks is undone if the model has the stored name.
        (["a.w", "model.b.w"], ["a.w"], [(r"(a|b)", "nowhere")]),
        # Renamings apply in turn, each to the result of the previous one.
        (["a.w"], ["c.w"], [("a", "b"), ("b", "c")]),
        # The first occurrence of the matched text is replaced, which may not be the match.
        (["w.scale.w"], ["v.scale.w"], [(r"\bw$", "v")]),
        # Sorting compares numbers with words, which must not fail. The model lacks three names.
        (["x.10.w", "x.9.w", "y_10.w", "y_9.w", "x.a.w"], ["x.9.w", "y_9.w"], []),
    ],
)
def test_names_are_matched_as_transformers_matches_them(
    names: list[str], targets: list[str], transforms: list[tuple[str, str]]
) -> None:
    renamings = [upstream.WeightRenaming(source, target) for source, target in transforms]
    ours = loaded_by_both(names, dict.fromkeys(targets, (2,)), renamings)
    assert ours.arrays.keys() == set(targets)


NORMS = [f"model.blocks.{i}.norm{n}.w" for i in (0, 1) for n in (0, 1)]


@pytest.mark.parametrize("converted", [False, True])
def test_a_guarded_renaming_depends_on_the_names_before(converted: bool) -> None:
    """The first pattern of a GroupWeightRename is its guard: the other patterns apply only to names
    that come after one that matches the guard. A checkpoint that is converted already has no such
    name, and is not renamed again."""
    group = upstream.GroupWeightRename(
        [r"blocks.(\d+).norm0", r"blocks.(\d+).norm1"], [r"blocks.\1.norm1", r"blocks.\1.norm2"]
    )
    after = [name.replace("norm1", "norm2").replace("norm0", "norm1") for name in NORMS]
    ours = loaded_by_both(after if converted else NORMS, dict.fromkeys(after, (2,)), [group])
    assert ours.arrays.keys() == set(after)


def test_if_two_converters_have_one_pattern_the_last_applies() -> None:
    ids = Ids({})
    ids.add("x.a.w", (4, 4))
    pair = [upstream.Transpose(0, 1)], [upstream.Interleave(0)]
    converters = [upstream.WeightConverter("a.w", "b.w", operations) for operations in pair]
    model = Names({"x.b.w": (4, 4)})
    theirs = oracle.load_upstream(deepcopy(converters), ids, model)
    assert compare(translated(converters, ids, model), theirs, ids) == 1


def test_the_order_of_names_equals_transformers() -> None:
    names = ["b.10", "b.9", "b.x10", "b.x9", "b.x", "b", "a.10.c", "a.x.c", "a.9", "b.1x", "c2.1"]
    assert sorted(names, key=translation.natural_key) == sorted(names, key=upstream.dot_natural_key)


# ---- loads by the program


def load_by_program(
    modicum: Path, directory: Path, recipe: Recipe, tensors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The shards of two ranks after `modicum load --recipe`, concatenated."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    path = directory / "recipe.json"
    path.write_text(recipe.text())
    run_json(modicum, "load", directory, "--recipe", path, "--ranks=2", "--dump", directory / "d")
    ranks = [load_file(directory / f"d/rank-{rank:05d}.safetensors") for rank in (0, 1)]
    return {name: np.concatenate([rank[name] for rank in ranks]) for name in ranks[0]}


def one_key_per_chain() -> dict[str, str]:
    """By chain of operations, the first key of the mapping that has it."""
    chains: dict[str, str] = {}
    for key in sorted(oracle.mapping()):
        for converter in oracle.converters_of(fresh(key)):
            chains.setdefault(oracle.chain_of(converter), key)
    return chains


@pytest.mark.parametrize("key", sorted(set(one_key_per_chain().values())))
def test_the_program_loads_what_transformers_converts(
    key: str, modicum: Path, tmp_path: Path
) -> None:
    ids, given, _ = oracle.checkpoint_for(fresh(key), 0)
    model = Names(oracle.target_shapes(fresh(key), ids, given))
    ours = translated(fresh(key), ids, model)
    theirs = oracle.load_upstream(fresh(key), ids, model)
    recipe = Recipe({name: array.node for name, array in ours.arrays.items()})
    loaded = load_by_program(modicum, tmp_path / "checkpoint", recipe, ids.tensors)
    assert loaded.keys() == theirs.tensors.keys()
    for name, values in theirs.tensors.items():
        assert np.array_equal(loaded[name], values), name
