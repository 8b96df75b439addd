"""docs/internals/numerics.md defines AdamW to the bit. These tests compare the kernels with an
implementation in numpy that was written from that page alone (tests/support/adamw_in_numpy.py).
They run on the fastest instruction set; kernels/adamw_test.cc shows that all give the same bits.

Catches: formats, arithmetic, random bits or blocks of scales that differ in any bit from those on
the page.
"""

from dataclasses import asdict, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from adamw_in_numpy import FORMATS, Settings, Shard, State, fma  # noqa: E402

import modicum  # noqa: E402
from modicum import _modicum  # noqa: E402

SEED = 0x9E3779B97F4A7C15
# Parameters with enough elements for 8-bit moments, and rows whose lengths (131, 5 x 50 and 200)
# are no multiples of 128. Runs are (first element, number of elements) within the parameter.
SHARDS = [
    Shard("a", (40, 131), ((0, 655),)),
    Shard("bc", (30, 5, 50), ((1000, 750),)),
    Shard("w.1", (40, 200), ((1400, 400), (6000, 200))),
]
NUMEL = sum(n for shard in SHARDS for _, n in shard.runs)
FORMAT_NAMES = list(FORMATS)
SETTINGS = {
    "torch": Settings(),
    "torch amsgrad": Settings(amsgrad=True),
    "torch L2": Settings(decoupled=False, maximize=True, eps=1e-6),
    "torch short memory": Settings(betas=(0.3, 0.9), weight_decay=0.0),
    "torch no bias": Settings(bias_correction=False, maximize=True, amsgrad=True),
    "deepspeed": Settings(semantics="deepspeed"),
    "deepspeed L2": Settings(semantics="deepspeed", decoupled=False),
    "deepspeed no bias": Settings(semantics="deepspeed", bias_correction=False, betas=(0.4, 0.95)),
}


def kernels(name: str, settings: Settings, values: Any) -> Any:
    """Modicum's state for SHARDS in format `name`, with masters `values` (NUMEL fp32)."""
    shards = [_modicum.AdamWShard(shard.name, shard.shape, shard.runs) for shard in SHARDS]
    of = _modicum.AdamW(
        shards, [_modicum.AdamOptions(**asdict(settings))], format=name, ledger=modicum.Ledger(),
        seed=SEED, threads=1,
    )  # fmt: skip
    for shard, part in enumerate(parts(values)):
        of.import_from(shard, "master", part)
    return of


def parts(values: Any) -> Any:
    """Splits an array of all shards' elements into one array per shard."""
    ends = np.cumsum([sum(n for _, n in shard.runs) for shard in SHARDS])
    return np.split(values, ends[:-1])


def stored(of: Any, plane: str) -> list[Any]:
    """Bytes of a plane, shard by shard; those of a moment are followed by their scales. The arrays
    are views: they change with each step."""
    reads = [of.plane, of.scales] if plane.startswith(("exp", "max")) else [of.plane]
    return [np.from_dlpack(read(at, plane)) for at in range(len(SHARDS)) for read in reads]


def expected(of: State, plane: str) -> list[Any]:
    """The same arrays, from the state in numpy."""
    moment = {"exp_avg": of.m, "exp_avg_sq": of.v, "max_exp_avg_sq": of.vmax}.get(plane)
    if moment is None:
        return [part.copy().view(np.uint8) for part in parts(getattr(of, plane))]
    both = []
    for at, part in enumerate(parts(moment.stored)):
        scales = moment.scales[of.blocks.shard == at] if moment.scales.size else moment.scales
        both += [part.copy().view(np.uint8), scales.view(np.uint8)]
    return both


class Comparison:
    """The state in numpy (`page`), and the kernels', which are given the same moments and
    gradients."""

    def __init__(self, name: str, settings: Settings, values: Any) -> None:
        self.page = State(FORMATS[name], SHARDS, settings, values, SEED)
        self.kernels = kernels(name, settings, values)
        planes = ["master", "exp_avg", "exp_avg_sq"]
        planes += ["low"] if FORMATS[name].master != "whole" else []
        planes += ["max_exp_avg_sq"] if settings.amsgrad else []
        of_plane = {"low": "master_low"}
        self.memory = {plane: stored(self.kernels, of_plane.get(plane, plane)) for plane in planes}

    def import_moments(self, m: Any, v: Any) -> None:
        self.page.import_moments(m, v)
        for shard, (first, second) in enumerate(zip(parts(m), parts(v), strict=True)):
            self.kernels.import_from(shard, "exp_avg", first)
            self.kernels.import_from(shard, "exp_avg_sq", second)
            if self.page.settings.amsgrad:
                self.kernels.import_from(shard, "max_exp_avg_sq", second)

    def step(self, gradient: Any, unscale: float, clip: float) -> None:
        self.page.step(gradient, unscale, clip)
        for shard, part in enumerate(parts(gradient)):
            self.kernels.arrive(shard, part)
        self.kernels.step(unscale, clip)

    def check(self) -> None:
        for plane, memory in self.memory.items():
            for got, wanted in zip(memory, expected(self.page, plane), strict=True):
                where = f"{plane}, after step {self.page.numbers.t}"
                np.testing.assert_array_equal(got, wanted, err_msg=where)


def run(name: str, settings: Settings, steps: int, imports: bool = False) -> None:
    """Makes steps and compares all planes: all of the first 20, then every 50th, and the last. The
    sizes of gradients differ by up to 10^7 within a block, and some are zero. Some steps unscale,
    some clip. With `imports`, the moments are set before the first step."""
    random = np.random.default_rng(7)
    values = (random.integers(-(1 << 14), 1 << 14, NUMEL) / np.float32(1 << 14)).astype(np.float32)
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # exact in bf16
    size = np.float32(10) ** random.uniform(-7, 0, NUMEL).astype(np.float32)
    size[random.random(NUMEL) < 0.05] = 0
    both = Comparison(name, settings, values)
    # The gradients of each step begin at another offset of this array.
    normals = random.standard_normal(NUMEL + 997, np.float32)
    if imports:
        m = normals[:NUMEL] * size
        both.import_moments(m, m * m * np.float32(3))
        both.check()
    for step in range(steps):
        shift = step * 131 % 997
        gradient = normals[shift : shift + NUMEL] * size * np.float32(1 + step % 5)
        both.step(gradient, 1 / 1024 if step % 3 == 2 else 1.0, 0.37 if step % 7 == 5 else 1.0)
        if step < 20 or step % 50 == 49 or step + 1 == steps:
            both.check()


@pytest.fixture(autouse=True)
def quiet_numpy() -> Any:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("settings", ("torch", "deepspeed"))
def test_a_thousand_steps_equal_the_page_to_the_bit(name: str, settings: str) -> None:
    run(name, SETTINGS[settings], 1000)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("settings", [key for key in SETTINGS if key not in ("torch", "deepspeed")])
def test_every_setting_equals_the_page_to_the_bit(name: str, settings: str) -> None:
    run(name, SETTINGS[settings], 40, imports=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("settings", list(SETTINGS))
def test_a_thousand_steps_of_every_setting_equal_the_page(name: str, settings: str) -> None:
    run(name, SETTINGS[settings], 1000, imports=True)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_extreme_gradients_equal_the_page_to_the_bit(name: str) -> None:
    """Gradients are random bit patterns of finite numbers, denormal ones included. With lr = 1 some
    values overflow."""
    random = np.random.default_rng(8)
    both = Comparison(name, replace(SETTINGS["torch"], lr=1.0), np.zeros(NUMEL, np.float32))
    bits = random.integers(0, 0x7F7F0000, NUMEL, np.uint32)
    bits |= random.integers(0, 2, NUMEL, np.uint32) << np.uint32(31)
    for step in range(60):
        both.step(np.roll(bits, step // 7 * 100).view(np.float32), 1.0, 1.0)
        both.check()


def test_fma_is_rounded_once() -> None:
    """The oracle's own `fma` returns a float32 nearest to the exact result, including cases in
    which the sum in fp64 is halfway between two float32."""
    from fractions import Fraction

    random = np.random.default_rng(9)
    one, tiny = np.float32(1), np.float32(2.0**-60)
    cases = [(one + np.float32(2**-23), one + np.float32(2**-23), tiny * sign) for sign in (1, -1)]
    floats = random.integers(0, 1 << 32, (4000, 3), np.uint32).view(np.float32)
    cases += [tuple(row) for row in floats if np.isfinite(row).all()]
    a, b, c = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    with np.errstate(all="ignore"):
        got = fma(a, b, c)
    for case, result in zip(cases, got, strict=True):
        exact = Fraction(float(case[0])) * Fraction(float(case[1])) + Fraction(float(case[2]))
        if not np.isfinite(result):
            assert abs(exact) >= Fraction(float(np.finfo(np.float32).max))
            continue
        near = [np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf)]
        off = abs(Fraction(float(result)) - exact)
        assert all(off <= abs(Fraction(float(x)) - exact) for x in near if np.isfinite(x))
