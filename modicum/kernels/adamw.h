// AdamW over contiguous elements in every state format, and the gradient's way there. One source
// for every instruction set, chosen at run time; the same bits on all of them, at any number of
// threads, however the elements are cut into calls (blocks of 8-bit moments apart: see below).
//
// Pure and noexcept: no allocation, no checks. The callers hold the shapes right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// `torch`: the arithmetic of torch.optim.AdamW's single-tensor and foreach paths, rounding by
// rounding. `deepspeed`: DeepSpeedCPUAdam's.
enum class AdamSemantics : uint8_t { torch, deepspeed };

// What a user says of one parameter group.
struct AdamOptions {
  AdamSemantics semantics = AdamSemantics::torch;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool decoupled = true;  // false: L2, the decay is added to the gradient
  bool amsgrad = false;   // `torch` only
  bool maximize = false;  // `torch` only
  bool bias_correction = true;
  bool operator==(const AdamOptions&) const = default;
};

// The numbers of one group in one step, each rounded once, where the semantics round them.
struct AdamNumbers {
  AdamSemantics semantics = AdamSemantics::torch;
  bool decoupled = true;
  bool amsgrad = false;
  bool maximize = false;
  float unscale = 1.0F;  // the gradient is multiplied by this, then by `clip`: two roundings, as
  float clip = 1.0F;     // the passes of others round
  float decay = 1.0F;    // torch, decoupled: 1 - lr * wd; deepspeed, decoupled: -lr * wd; L2: wd
  float beta1 = 0.9F;
  float beta2 = 0.999F;
  float one_minus_beta1 = 0.1F;
  float one_minus_beta2 = 0.001F;
  float bias2 = 1.0F;  // torch: sqrt(1 - beta2^t), a divisor; deepspeed: its inverse, a factor
  float eps = 1e-8F;
  float step_size = -1e-3F;  // -lr / (1 - beta1^t)
  uint64_t seed = 0;         // of the random bits
  int64_t step = 1;          // t, from 1: for the random bits
};
AdamNumbers adam_numbers(const AdamOptions& options, int64_t step, uint64_t seed);

// Neighbouring elements of one parameter, in memory and in the parameter's row-major order alike.
// Pointers are to the first of them, each plane in the dtype that the format's row says; those that
// the format has not are null. The first scale is that of the block in which element `first` lies,
// element i's the one (first % kScaleBlock + i) / kScaleBlock further on.
//
// Random bits depend on (seed, step, parameter, global element index) and on nothing else. A block
// of 8-bit moments that is cut into two calls has two scales: cut at multiples of kScaleBlock of
// the global index wherever one may choose.
struct AdamSpan {
  StateFormat format = StateFormat::fp32;
  uint64_t parameter = 0;  // name_hash of its FQN
  int64_t first = 0;       // global row-major index of the first element
  int64_t n = 0;
  std::byte* master = nullptr;  // fp32, or the bf16 half of a split one
  std::byte* master_low = nullptr;
  const std::byte* grad = nullptr;
  DType grad_dtype = DType::f32;  // f32, bf16 or f16
  std::byte* exp_avg = nullptr;
  std::byte* exp_avg_sq = nullptr;
  std::byte* max_exp_avg_sq = nullptr;  // amsgrad: in exp_avg_sq's form
  float* exp_avg_scale = nullptr;
  float* exp_avg_sq_scale = nullptr;
  float* max_exp_avg_sq_scale = nullptr;
  std::byte* out = nullptr;  // also the new parameter in `out_dtype` (bf16, f16; nearest even)
  DType out_dtype = DType::bf16;
};
// One step. The gradient is finite (see squares), and `grad` is read only.
void adamw(const AdamNumbers& numbers, const AdamSpan& span) noexcept;

// fp32 values to the format's planes and back: which one of `AdamSpan`'s planes is meant is said by
// `plane`. Exact out of every format; into fp32 and fp32-split exact as well, elsewhere rounded as
// a step rounds, with `numbers`' random bits.
enum class StatePlane : uint8_t { master, exp_avg, exp_avg_sq, max_exp_avg_sq };
void export_state(const AdamSpan& span, StatePlane plane, float* to) noexcept;
void import_state(const AdamNumbers& numbers, const AdamSpan& span, StatePlane plane,
                  const float* from) noexcept;

// to[i] += from[i] in fp32, where `to` holds fp32 and `from` f32, bf16 or f16.
void add_gradients(const std::byte* from, DType from_dtype, std::byte* to, int64_t n) noexcept;

// A part of a gradient's norm, or the sum of parts. Whether all elements are finite is a flag and
// never a number: where it is false, the sum means nothing and is 0.
struct GradNorm {
  double sum_of_squares = 0;  // of the gradients as they arrived
  bool finite = true;

  GradNorm& operator+=(const GradNorm& other) noexcept;
  // Of the gradients times `unscale`.
  double norm(double unscale = 1) const noexcept;
};
// Of `n` elements: squares in fp64, always added up in the same order.
GradNorm squares(const std::byte* grad, DType dtype, int64_t n) noexcept;

// The instruction sets that this program has kernels for and this machine runs, best first, by the
// names that `--isa` takes; and those that were built but can't run here.
std::vector<std::string_view> isas();
std::vector<std::string_view> isas_not_run();
std::string_view isa() noexcept;      // in force
void use_isa(std::string_view name);  // for this process, from now on; unknown: USAGE
}  // namespace modicum
