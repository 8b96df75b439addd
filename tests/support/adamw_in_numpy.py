"""AdamW's formats, arithmetic and random bits in numpy, from docs/internals/numerics.md alone.

Section names below are that page's. Arrays hold the elements of all shards of a state, one after
the other. fp32 is numpy's: +, -, *, / and sqrt are rounded to nearest even; `fma` is below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
F = np.float32
U32, U64 = np.uint32, np.uint64


def fma(a: Any, b: Any, c: Any) -> Array:
    """a b + c with one rounding. The product of two fp32 is exact in fp64. The sum is rounded to
    odd there (an inexact result gets an odd last bit), which makes the second rounding correct."""
    product = np.multiply(a, b, dtype=np.float64)
    sum_ = np.add(product, c, dtype=np.float64)
    part = sum_ - product
    error = (product - (sum_ - part)) + (c - part)  # exact
    bits = sum_.view(np.int64)
    to_odd = (error != 0) & (bits & 1 == 0) & np.isfinite(sum_)
    away = (error > 0) == (sum_ > 0)
    odd = np.where(to_odd, bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(F)


# ---- Formats


class Format(NamedTuple):
    master: str  # whole, split or short
    grad: str  # fp32 or bf16
    moments: str  # fp32, bf16 or codes


FORMATS = {
    "fp32": Format("whole", "fp32", "fp32"),
    "fp32-split": Format("split", "bf16", "fp32"),
    "bf16-moments": Format("split", "bf16", "bf16"),
    "int8-moments": Format("split", "bf16", "codes"),
    "int8-moments-24": Format("short", "bf16", "codes"),
    "bf16-moments-fp32": Format("whole", "fp32", "bf16"),
    "int8-moments-fp32": Format("whole", "fp32", "codes"),
}


def bf16(x: Array) -> Array:
    """The bits of the nearest bf16, ties to even."""
    b = x.view(U32)
    return ((b + U32(0x7FFF) + ((b >> U32(16)) & U32(1))) >> U32(16)).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(U32) << U32(16)).view(F)


def split(b: Array) -> tuple[Array, Array]:
    upper = (b + U32(0x8000)) >> U32(16)
    return upper.astype(np.uint16), (b - (upper << U32(16))).view(np.int32)


def joined(upper: Array, lower: Array) -> Array:
    alone = upper.astype(U32) << U32(16)
    b = alone + lower.astype(np.int32).view(U32)
    return np.where((b & U32(0x7FFFFFFF)) >= U32(0x7F7F8000), alone, b).view(F)


class Codes:
    """The codes of exp_avg (dropped = 19, top = 496), or of the square roots of exp_avg_sq
    (18, 504)."""

    def __init__(self, dropped: int, top: int) -> None:
        self.dropped, self.top, self.range = U32(dropped), F(top), F(top - 2)
        self.back = F(1) / self.range

    def values(self, codes: Array, scale: Array) -> Array:
        z = (U32(0x40000000) + (codes.astype(U32) << self.dropped)).view(F)
        return ((z - F(2)) * self.back) * scale

    def offset(self, magnitude: Array, scale: Array) -> Array:
        return fma(magnitude, (self.range / scale) * F(1 + 2.0**-22), F(2))

    def rounded(self, z: Array, r: Array) -> Array:
        """The bits of an offset after rounding, including the dropped bits below the code."""
        return np.minimum(z, self.top).view(U32) + r

    def code(self, bits: Array) -> Array:
        return (bits - U32(0x40000000)) >> self.dropped


SIGNED, ROOTS = Codes(19, 496), Codes(18, 504)
LEAST_SCALE = F(2.0**-100)
CAP = F(2.0**63)


def capped(x: Array) -> Array:
    return np.clip(np.where(np.isnan(x), F(0), x), -CAP, CAP)


# ---- Random bits

G = 0x9E3779B97F4A7C15
M64 = (1 << 64) - 1


def mix(x: Any) -> Any:
    x = x ^ (x >> U64(30))
    x = x * U64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> U64(27))
    x = x * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def name_hash(name: str) -> int:
    """XXH3, 64 bits, seed 0, for inputs of 1 to 3 bytes (from its specification)."""
    text = name.encode()
    assert 1 <= len(text) <= 3
    word = text[0] << 16 | text[len(text) // 2] << 24 | text[-1] | len(text) << 8
    x = word ^ 0x396CFEB8 ^ 0xBE4BA423
    x = ((x ^ x >> 33) * 0xC2B2AE3D27D4EB4F) & M64
    x = ((x ^ x >> 29) * 0x165667B19E3779F9) & M64
    return x ^ x >> 32


# ---- Blocks


class Shard(NamedTuple):
    """A shard of a state: the parameter's name and shape, and its elements as runs (first, n)."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


def row_of(shape: Sequence[int]) -> int:
    """The length of the rows that are divided into blocks of codes."""
    for dims in range(1, len(shape)):
        if (row := math.prod(shape[-dims:])) >= 128:
            return row
    return 128  # blocks of the flat index


class Blocks:
    """The blocks of all elements, and the place of each element in its block."""

    def __init__(self, shards: Sequence[Shard], has_codes: bool) -> None:
        self.shards = shards
        hashes, blocks, places, shard_of = [], [], [], []
        for at, shard in enumerate(shards):
            index = np.concatenate([np.arange(first, first + n) for first, n in shard.runs])
            row = row_of(shard.shape) if has_codes else 128
            blocks.append(index // row * -(-row // 128) + index % row // 128)
            places.append(index % row % 128)
            hashes.append(np.full(index.size, name_hash(shard.name), U64))
            shard_of.append(np.full(index.size, at))
        block, shard = np.concatenate(blocks), np.concatenate(shard_of)
        self.place = np.concatenate(places).astype(U32)
        new = np.flatnonzero((np.diff(block, prepend=-1) != 0) | (np.diff(shard, prepend=-1) != 0))
        self.starts = new
        self.sizes = np.diff(new, append=block.size)
        self.block, self.hash = block[new].astype(U64), np.concatenate(hashes)[new]
        self.shard = shard[new]
        self.spread = np.repeat(np.arange(new.size), self.sizes)

    def words(self, seed: int, step: int) -> Array:
        stream = mix(mix(mix(np.array([seed], U64) + U64(G)) + U64(step)) + self.hash)
        key = mix(stream + (self.block + U64(1)) * U64(G))[self.spread]
        low, high = key.astype(U32), (key >> U64(32)).astype(U32)
        x = low + self.place * U32(0x9E3779B9)
        x = (x ^ (x >> U32(15))) * (high | U32(1))
        return x ^ (x >> U32(16))

    def largest(self, x: Array) -> Array:
        """The largest magnitude in each block."""
        return np.maximum.reduceat(np.abs(x), self.starts)


# ---- Arithmetic


@dataclass(frozen=True)
class Settings:
    semantics: str = "torch"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    amsgrad: bool = False
    maximize: bool = False
    bias_correction: bool = True


class Numbers:
    """The coefficients of a step; steps are taken in order, from 1 on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.powers = [F(1), F(1)]
        self.t = 0

    def advance(self) -> None:
        self.t += 1
        (self.torch if self.settings.semantics == "torch" else self.deepspeed)()

    def torch(self) -> None:
        of, t = self.settings, min(self.t, 1 << 24)
        rest1, rest2 = (1 - beta**t if of.bias_correction else 1.0 for beta in of.betas)
        self.w, self.w2 = F(1 - of.betas[0]), F(1 - of.betas[1])
        self.bias2 = F(rest2**0.5)
        self.step_size = F(-(of.lr / rest1))
        self.decay = F(1 - of.lr * of.weight_decay)

    def deepspeed(self) -> None:
        of, betas = self.settings, [F(beta) for beta in self.settings.betas]
        self.powers = [power * beta for power, beta in zip(self.powers, betas, strict=True)]
        rest1, rest2 = (F(1) - p if of.bias_correction else F(1) for p in self.powers)
        self.w, self.w2 = F(1) - betas[0], F(1) - betas[1]
        self.bias2 = F(1) / np.sqrt(rest2)
        self.step_size = -F(of.lr) / rest1
        self.decay = -F(of.lr) * F(of.weight_decay)


@dataclass
class Moment:
    """A moment in its stored form: fp32, bf16 bits, or codes and a scale for each block."""

    stored: Array
    scales: Array = field(default_factory=lambda: np.zeros(0, F))


class State:
    """The planes of a state. `master` begins as `values`, all moments as zero."""

    def __init__(
        self, form: Format, shards: Sequence[Shard], settings: Settings, values: Array, seed: int
    ) -> None:
        self.form, self.settings, self.seed = form, settings, seed
        self.blocks = Blocks(shards, form.moments == "codes")
        self.numbers = Numbers(settings)
        self.master, self.low = values.copy(), np.zeros(0, np.int16)
        if form.master != "whole":
            self.keep_master(values, np.zeros(values.size, U32))
        dtypes = {"fp32": (F, F), "bf16": (np.uint16,) * 2, "codes": (np.uint8,) * 2}
        count = self.blocks.starts.size if form.moments == "codes" else 0
        self.m, self.v, self.vmax = (
            Moment(np.zeros(values.size, dtypes[form.moments][of]), np.zeros(count, F))
            for of in (0, 1, 1)
        )

    # The stored forms.

    def values(self) -> Array:
        if self.form.master == "whole":
            return self.master
        shift = 8 if self.form.master == "short" else 0
        return joined(self.master, self.low.astype(np.int32) << shift)

    def keep_master(self, p: Array, words: Array) -> None:
        b = p.view(U32)
        if self.form.master == "whole":
            self.master = p
            return
        if self.form.master == "short":
            b = (b + (words & U32(0xFF))) & ~U32(0xFF)
        self.master, lower = split(b)
        self.low = (
            (lower >> 8).astype(np.int8) if self.form.master == "short" else lower.astype(np.int16)
        )

    def spread(self, scales: Array) -> Array:
        return scales[self.blocks.spread]

    def first_moment(self) -> Array:
        if self.form.moments == "codes":
            magnitude = SIGNED.values(self.m.stored & np.uint8(127), self.spread(self.m.scales))
            return np.where(self.m.stored > 127, -magnitude, magnitude)
        return self.m.stored if self.form.moments == "fp32" else from_bf16(self.m.stored)

    def second_moment(self, of: Moment) -> Array:
        if self.form.moments == "codes":
            root = ROOTS.values(of.stored, self.spread(of.scales))
            return root * root
        return of.stored if self.form.moments == "fp32" else from_bf16(of.stored)

    def keep_moments(self, m: Array, seconds: Sequence[tuple[Moment, Array]], words: Array) -> None:
        first, other = words & U32(0xFFFF), words >> U32(16)
        if self.form.moments == "fp32":
            self.m.stored = m
            for of, v in seconds:
                of.stored = v
        elif self.form.moments == "bf16":
            self.m.stored = ((m.view(U32) + first) >> U32(16)).astype(np.uint16)
            for of, v in seconds:
                of.stored = ((v.view(U32) + other) >> U32(16)).astype(np.uint16)
        else:
            self.encode(m, seconds, words >> U32(13), words & U32(0x3FFFF), is_step=True)

    def encode(
        self, m: Array, seconds: Sequence[tuple[Moment, Array]], r: Array, r2: Array, is_step: bool
    ) -> None:
        m = capped(m)
        s_m = self.m.scales = self.blocks.largest(m)
        z_m = SIGNED.offset(np.abs(m), self.spread(np.maximum(s_m, LEAST_SCALE)))
        bits = SIGNED.rounded(z_m, r)
        sign = np.where(np.signbit(m), U32(128), U32(0))
        self.m.stored = (SIGNED.code(bits) + sign).astype(np.uint8)
        for of, v in seconds:
            root = capped(np.sqrt(v))
            s = of.scales = self.blocks.largest(root)
            under = np.maximum(s, LEAST_SCALE)
            least: Any = F(2.0625)
            if is_step:
                w = self.spread((F(0.75 / 16) * F(502) / F(494)) * s_m / under)
                segment = (bits & U32(0x7F800000)).view(F)
                least = fma(segment, w, least)
            z = np.maximum(ROOTS.offset(root, self.spread(under)), least)
            code = ROOTS.code(ROOTS.rounded(z, r2))
            of.stored = np.where(root == 0, U32(0), code).astype(np.uint8)

    def import_moments(self, m: Array, v: Array) -> None:
        """Imports moments before the first step. bf16 is rounded with the random bits of the
        parameter's last step, here step 0."""
        seconds = [(self.v, v), (self.vmax, v)]
        if self.form.moments == "codes":
            half = np.full(m.size, U32(1 << 18))
            self.encode(m, seconds, half, half >> U32(1), is_step=False)
        else:
            self.keep_moments(m, seconds, self.blocks.words(self.seed, self.numbers.t))

    # A step.

    def step(self, gradient: Array, unscale: float = 1.0, clip: float = 1.0) -> None:
        of, n = self.settings, self.numbers
        n.advance()
        g = gradient if self.form.grad == "fp32" else from_bf16(bf16(gradient))
        g = (g * F(unscale)) * F(clip)
        g = -g if of.maximize else g
        p, m, v = self.values(), self.first_moment(), self.second_moment(self.v)
        if of.weight_decay != 0 and not of.decoupled:
            g = fma(F(of.weight_decay), p, g)
        torch = of.semantics == "torch"
        m, v = (self.torch_moments if torch else self.deepspeed_moments)(g, m, v)
        seconds = [(self.v, v)]
        used = v
        if of.amsgrad:
            used = np.maximum(self.second_moment(self.vmax), v)
            seconds.append((self.vmax, used))
        d = self.denominator(np.sqrt(used))
        if of.weight_decay != 0 and of.decoupled:
            p = p * n.decay if torch else fma(p, n.decay, p)
        p = p + (n.step_size * m) / d if torch else fma(m / d, n.step_size, p)
        words = self.blocks.words(self.seed, n.t)
        self.keep_master(p, words)
        self.keep_moments(m, seconds, words)

    def torch_moments(self, g: Array, m: Array, v: Array) -> tuple[Array, Array]:
        n, apart = self.numbers, g - m
        m = fma(n.w, apart, m) if n.w < 0.5 else fma(n.w - F(1), apart, g)
        return m, fma(n.w2 * g, g, v * F(self.settings.betas[1]))

    def deepspeed_moments(self, g: Array, m: Array, v: Array) -> tuple[Array, Array]:
        n, betas = self.numbers, self.settings.betas
        return fma(g, n.w, m * F(betas[0])), fma(g * g, n.w2, v * F(betas[1]))

    def denominator(self, root: Array) -> Array:
        n, eps = self.numbers, F(self.settings.eps)
        if self.settings.semantics == "deepspeed":
            return fma(root, n.bias2, eps)
        if self.form.moments == "codes":
            return fma(root, F(1) / n.bias2, eps)
        return root / n.bias2 + eps
