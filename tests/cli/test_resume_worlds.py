"""Training that is resumed with another world size and layout gives the same digests of model and
state as uninterrupted training: 1 to 8 ranks, every state format, FSDP2, TP x FSDP, HSDP and
ZeRO-2.

The model has the difficult shapes: fewer rows than ranks (empty shards), rows that do not divide
evenly (padding), vectors, a tensor of one element and one without elements, integers, a tied head;
and parameters kept in fp32 next to those in bf16.

Some pairs of worlds, with ranks that are threads, are tested in modicum/cli/resumed_worlds_test.cc,
whose head names the faults that they catch.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from program import failure, run_json, stored, write_checkpoint, write_recipe

torch = pytest.importorskip("torch")

FORMATS = ("fp32", "fp32-split", "bf16-moments", "int8-moments", "int8-moments-24")
LAYOUTS = ("fsdp2", "tp-fsdp", "hsdp", "zero2")
WORLDS = range(1, 9)
# Meshes by world size: dp x tp, and replicas x shards.
TP = {1: "1x1", 2: "1x2", 3: "3x1", 4: "2x2", 5: "5x1", 6: "3x2", 7: "7x1", 8: "4x2"}
HSDP = {1: "1x1", 2: "2x1", 3: "1x3", 4: "2x2", 5: "5x1", 6: "2x3", 7: "1x7", 8: "2x4"}
BEFORE, AFTER = 3, 3  # optimizer steps before the save and after the resume
SEED = 9

SHAPES = {
    "embed.weight": (37, 128),
    "layers.0.norm.weight": (5,),
    "layers.0.q_proj.weight": (48, 128),
    "layers.0.o_proj.weight": (16, 512),  # cut along dim 1 at multiples of 128
    "layers.0.up_proj.weight": (3, 2048),
    "layers.1.norm.weight": (131,),
    "layers.1.q_proj.weight": (7, 13),
    "layers.1.up_proj.weight": (33, 256),
    "scale": (1,),
    "none": (0, 4),
    "counts": (9,),  # integers: without state
}


@dataclass(frozen=True)
class Cut:
    """A layout for a number of ranks."""

    layout: str
    world: int

    @property
    def flags(self) -> list[object]:
        mesh = {"tp-fsdp": TP, "hsdp": HSDP}.get(self.layout)
        words: list[object] = ["--ranks", self.world, "--layout", self.layout]
        words += ["--mesh", mesh[self.world]] if mesh else []
        return words + (["--tp-rowwise", "o_proj"] if self.layout == "tp-fsdp" else [])

    def holds(self, state_format: str) -> bool:
        """Whether the format can be saved in this layout: ZeRO's flat groups divide blocks of 8-bit
        moments between ranks."""
        return self.layout != "zero2" or self.world == 1 or "int8" not in state_format


@dataclass(frozen=True)
class Model:
    """A checkpoint and its recipe. `whole` has, by format, the digests of model and state after
    uninterrupted training, once they have been computed."""

    modicum: Path
    directory: Path
    recipe: Path
    whole: dict[str, tuple[str, str]] = field(default_factory=dict)

    def uninterrupted(self, state_format: str) -> tuple[str, str]:
        if state_format not in self.whole:
            words = self._words(state_format)
            run = run_json(self.modicum, "rehearse", *words, "--steps", BEFORE + AFTER)
            self.whole[state_format] = run["model_digest"], run["digest_uninterrupted"]
        return self.whole[state_format]

    def _words(self, state_format: str) -> list[object]:
        words: list[object] = [self.directory, "--recipe", self.recipe, "--seed", SEED]
        return [*words, "--optimizer", f"adamw:{state_format}", "--keep-fp32", r"layers\.1\."]

    def save(self, root: Path, state_format: str, cut: Cut) -> bool:
        """Makes BEFORE steps and saves. Returns whether this layout can save this format; asserts
        that otherwise the error names a parameter."""
        directory, *words = self._words(state_format)
        words = ["save", directory, root, *words, "--step", BEFORE, "--steps", BEFORE, *cut.flags]
        if cut.holds(state_format):
            run_json(self.modicum, *words)
            facts = (root / f"step-{BEFORE}/optimizer/state.json").read_text()
            assert json.loads(facts)["without_state"] == ["none", "counts"]
            return True
        error = failure(self.modicum, 2, *words)
        assert error["category"] == "UNSUPPORTED" and error["tensor"] in SHAPES
        assert not root.exists()
        return False

    def resume(self, root: Path, state_format: str, cut: Cut) -> bool:
        """Resumes, makes AFTER steps, and asserts that the digests are those of uninterrupted
        training. Returns whether this layout can hold this format."""
        words = ["resume", root, "--recipe", self.recipe, "--steps", AFTER, *cut.flags]
        if cut.holds(state_format):
            resumed = run_json(self.modicum, *words)
            digests = resumed["digest"], resumed["state_digest"]
            assert digests == self.uninterrupted(state_format), (state_format, cut)
            return True
        assert failure(self.modicum, 2, *words)["category"] == "UNSUPPORTED"
        return False


@pytest.fixture(scope="module")
def model(modicum: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("worlds")
    rng = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=rng).mul(0.05).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    tensors["counts"] = torch.arange(9)
    directory = write_checkpoint(folder / "model", tensors, files=3)
    targets: dict[str, Any] = {name: stored(name) for name in SHAPES}
    targets["head.weight"] = {"op": "alias", "of": "embed.weight"}
    return Model(modicum, directory, write_recipe(folder / "recipe.json", targets))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_format", FORMATS)
def test_all_pairs_of_worlds_equal_uninterrupted_training(
    model: Model, tmp_path: Path, state_format: str, layout: str
) -> None:
    """All 64 pairs of the world that saves and the one that resumes, which resumes in the layout of
    the save and in a second one."""
    counts = {"resumed": 0, "refused": 0}
    for before in (Cut(layout, world) for world in WORLDS):
        root = tmp_path / str(before.world)
        saved = model.save(root, state_format, before)
        for world in WORLDS:
            others = LAYOUTS[(world + before.world) % 4], layout
            for after in {Cut(other, world) for other in others}:
                done = saved and model.resume(root, state_format, after)
                counts["resumed" if done else "refused"] += 1
    print(f"{state_format} saved in {layout}: {counts}")
    assert sum(counts.values()) >= 64
    assert counts["refused"] == 0 or "int8" in state_format


def test_a_tie_of_the_recipe_is_known_to_the_resume(modicum: Path, tmp_path: Path) -> None:
    """Both names are stored. Without the recipe the second one would be a parameter of its own,
    for which no state was saved."""
    weight = torch.randn(8, 4)
    tensors = {"shared.weight": weight, "encoder.weight": weight.clone(), "x": torch.randn(6)}
    directory = write_checkpoint(tmp_path / "model", tensors)
    tie = {"op": "alias", "of": "shared.weight", "in": [stored("encoder.weight")]}
    targets = {name: stored(name) for name in ("shared.weight", "x")} | {"encoder.weight": tie}
    recipe = write_recipe(tmp_path / "recipe.json", targets)
    words = ("--ranks", 2, "--optimizer", "adamw:fp32")
    saved = run_json(
        modicum, "save", directory, tmp_path / "run", "--recipe", recipe, "--step", 1, *words
    )
    resumed = run_json(modicum, "resume", tmp_path / "run", *words)
    assert (resumed["digest"], resumed["state_digest"]) == (saved["digest"], saved["state_digest"])
