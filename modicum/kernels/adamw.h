// AdamW over contiguous elements in every state format; squares of gradients. One source is
// compiled for all instruction sets and dispatched at run time. Results are bit-equal on all of
// them. A step's results are also bit-equal for any number of threads and any division into calls
// (for 8-bit moments see AdamSpan).
//
// The kernels are noexcept, allocate nothing and check nothing: callers guarantee the shapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "modicum/spec/spec.h"

namespace modicum {

// Which implementation's roundings are reproduced. `torch`: the single-tensor and foreach paths of
// torch.optim.AdamW, with square roots rounded to nearest (those of torch's wheels are not).
// `deepspeed`: DeepSpeedCPUAdam.
enum class AdamSemantics : uint8_t { torch, deepspeed };

// The options of one parameter group.
struct AdamOptions {
  AdamSemantics semantics = AdamSemantics::torch;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool decoupled = true;  // false: L2, weight_decay times the parameter is added to the gradient
  bool amsgrad = false;   // `torch` only
  bool maximize = false;  // `torch` only
  bool bias_correction = true;
  bool operator==(const AdamOptions&) const = default;
};

// The constants of a group in one step, rounded as the semantics require.
struct AdamNumbers {
  AdamSemantics semantics = AdamSemantics::torch;
  bool decoupled = true;
  bool amsgrad = false;
  bool maximize = false;
  // The gradient is multiplied by `unscale`, then by `clip`: two roundings, as in frameworks that
  // use two passes.
  float unscale = 1.0F;
  float clip = 1.0F;
  float decay = 1.0F;  // torch, decoupled: 1 - lr * wd; deepspeed, decoupled: -lr * wd; L2: wd
  float beta1 = 0.9F;
  float beta2 = 0.999F;
  float one_minus_beta1 = 0.1F;
  float one_minus_beta2 = 0.001F;
  float bias2 = 1.0F;  // torch: sqrt(1 - beta2^t), a divisor; deepspeed: the inverse, a factor
  float eps = 1e-8F;
  float step_size = -1e-3F;  // -lr / (1 - beta1^t)
  uint64_t seed = 0;         // for stochastic rounding
  int64_t step = 1;          // t, from 1; for stochastic rounding
};
AdamNumbers adam_numbers(const AdamOptions& options, int64_t step, uint64_t seed);

// A power in fp32, computed by one multiplication per step, each rounded.
class RunningPower {
 public:
  RunningPower() = default;
  // base^step. Continues from the power of the last call if `base` is the same and `step` is not
  // lower, else from 1: both give the same bits.
  float at(float base, int64_t step) noexcept;

 private:
  explicit RunningPower(float base) : base_(base) {}
  float base_ = 0;
  int64_t step_ = 0;
  float power_ = 1;
};

// The powers that DeepSpeed's semantics need, kept from one step to the next.
struct BetaPowers {
  RunningPower beta1, beta2;
};
// Gives the same constants as the function above, but continues from `powers` and updates them.
// Takes constant time if `powers` are those of the step before, otherwise up to `step`
// multiplications per beta.
AdamNumbers adam_numbers(const AdamOptions& options, int64_t step, uint64_t seed,
                         BetaPowers& powers);

// Elements of one parameter that are contiguous both in memory and in global row-major order.
// Pointers point to the first element, each plane in the dtype of the format's row; planes that the
// format lacks are null. Scale 0 belongs to the block (ScaleBlocks) of element `first`. With rows
// of 300, first 200 and n 200:
//
//   global   128 ..... 200 ......... 256 ........ 300 ........ 400
//   block    1                       2            3
//   element            0 ........ 55 56 ...... 99 100 .... 199
//   scale    [0]                     [1]          [2]
//
// Random bits depend on (seed, step, parameter, global index, row) only. A block of 8-bit moments
// that is divided between two calls gets two scales, so divide where blocks begin.
struct AdamSpan {
  StateFormat format = StateFormat::fp32;
  uint64_t parameter = 0;  // name_hash of the parameter's FQN
  int64_t first = 0;       // global row-major index of the first element
  int64_t n = 0;
  int64_t row = 0;              // elements per row; 0: the parameter is one row
  std::byte* master = nullptr;  // fp32, or the bf16 half of a split master
  std::byte* master_low = nullptr;
  const std::byte* grad = nullptr;
  DType grad_dtype = DType::f32;  // f32, bf16 or f16
  std::byte* exp_avg = nullptr;
  std::byte* exp_avg_sq = nullptr;
  std::byte* max_exp_avg_sq = nullptr;  // amsgrad only; dtype of exp_avg_sq
  float* exp_avg_scale = nullptr;
  float* exp_avg_sq_scale = nullptr;
  float* max_exp_avg_sq_scale = nullptr;
  // Optional copy of the new parameter in `out_dtype`, rounded to nearest even.
  std::byte* out = nullptr;
  DType out_dtype = DType::bf16;  // or f16
};
// One step. Expects a finite gradient (see squares); does not write `grad`.
void adamw(const AdamNumbers& numbers, const AdamSpan& span) noexcept;

// Converts a plane of the state to fp32 and back. Export is exact. Import is exact into fp32 planes
// and, for values that round to a finite bf16, into split masters of 32 bits. It rounds split
// masters of 24 bits and bf16 moments with the random bits of `numbers`, 8-bit moments to the
// nearest code.
enum class StatePlane : uint8_t { master, exp_avg, exp_avg_sq, max_exp_avg_sq };
void export_state(const AdamSpan& span, StatePlane plane, float* to) noexcept;
void import_state(const AdamNumbers& numbers, const AdamSpan& span, StatePlane plane,
                  const float* from) noexcept;

// A partial gradient norm. If an element is not finite, `finite` is false and the sum is 0.
struct GradNorm {
  double sum_of_squares = 0;  // of the gradients before `unscale` and `clip`
  bool finite = true;

  GradNorm& operator+=(const GradNorm& other) noexcept;
  // The norm of the gradients times `unscale`.
  double norm(double unscale = 1) const noexcept;
};
// Sums the squares of `n` elements in fp64, in an order that depends on `n` only: a sum over two
// calls may differ from one call's in its last bits.
GradNorm squares(const std::byte* grad, DType dtype, int64_t n) noexcept;

// The instruction sets for which this program has kernels, best first, by their names in `--isa`.
// isas() has those that this machine supports, isas_not_run() the others.
std::vector<std::string_view> isas();
std::vector<std::string_view> isas_not_run();
std::string_view isa() noexcept;      // the one whose kernels are called now
void use_isa(std::string_view name);  // for the whole process; USAGE if it is not in isas()
}  // namespace modicum
