#include <algorithm>
#include <cmath>

#include "modicum/kernels/adamw.h"

namespace modicum {
namespace {

// torch counts steps in a float32 tensor, where adding 1 to 2^24 has no effect.
constexpr int64_t kTorchSteps = int64_t{1} << 24;

AdamNumbers torch_numbers(const AdamOptions& o, int64_t step, AdamNumbers n) noexcept {
  const auto t = static_cast<double>(std::min(step, kTorchSteps));
  const double correction1 = o.bias_correction ? 1 - std::pow(o.beta1, t) : 1;
  const double correction2 = o.bias_correction ? 1 - std::pow(o.beta2, t) : 1;
  n.decay = static_cast<float>(o.decoupled ? 1 - o.lr * o.weight_decay : o.weight_decay);
  n.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  n.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  n.bias2 = static_cast<float>(std::pow(correction2, 0.5));
  n.step_size = static_cast<float>(-(o.lr / correction1));
  return n;
}

AdamNumbers deepspeed_numbers(const AdamOptions& o, int64_t step, AdamNumbers n,
                              BetaPowers& powers) noexcept {
  const auto lr = static_cast<float>(o.lr);
  const auto weight_decay = static_cast<float>(o.weight_decay);
  const float correction1 = o.bias_correction ? 1 - powers.beta1.at(n.beta1, step) : 1;
  n.decay = o.decoupled ? -lr * weight_decay : weight_decay;
  n.one_minus_beta1 = 1 - n.beta1;
  n.one_minus_beta2 = 1 - n.beta2;
  n.bias2 = o.bias_correction ? 1 / std::sqrt(1 - powers.beta2.at(n.beta2, step)) : 1;
  n.step_size = -lr / correction1;
  return n;
}

}  // namespace

float RunningPower::at(float base, int64_t step) noexcept {
  if (base != base_ || step < step_) *this = RunningPower(base);
  while (step_ < step) {
    const float next = power_ * base_;
    // Once a product rounds to itself, all later ones are equal.
    step_ = next == power_ ? step : step_ + 1;
    power_ = next;
  }
  return power_;
}

AdamNumbers adam_numbers(const AdamOptions& options, int64_t step, uint64_t seed) {
  BetaPowers powers;
  return adam_numbers(options, step, seed, powers);
}

AdamNumbers adam_numbers(const AdamOptions& options, int64_t step, uint64_t seed,
                         BetaPowers& powers) {
  AdamNumbers numbers;
  numbers.semantics = options.semantics;
  numbers.decoupled = options.decoupled;
  numbers.amsgrad = options.amsgrad;
  numbers.maximize = options.maximize;
  numbers.beta1 = static_cast<float>(options.beta1);
  numbers.beta2 = static_cast<float>(options.beta2);
  numbers.eps = static_cast<float>(options.eps);
  numbers.seed = seed;
  numbers.step = step;
  const bool torch = options.semantics == AdamSemantics::torch;
  return torch ? torch_numbers(options, step, numbers)
               : deepspeed_numbers(options, step, numbers, powers);
}

}  // namespace modicum
