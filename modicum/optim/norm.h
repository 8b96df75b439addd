// What follows of the gradient's norm, and the scale of a loss. Values; any thread.
#pragma once

namespace modicum {

// min(1, max_norm / (norm + 1e-6)), torch's formula, in fp64 and rounded once. `max_norm` is not
// negative; infinity clips nothing.
float clip_factor(double norm, double max_norm) noexcept;

// torch.amp.GradScaler's bookkeeping: a loss is multiplied by `scale`; a step with a gradient that
// is not finite is skipped and halves it, `growth_interval` clean ones in a row double it.
struct LossScale {
  float scale = 65536.0F;
  float growth_factor = 2.0F;
  float backoff_factor = 0.5F;
  int growth_interval = 2000;
  int clean_steps = 0;

  float unscale() const noexcept;  // 1 / scale, rounded once
  void update(bool finite) noexcept;
  bool operator==(const LossScale&) const = default;
};

}  // namespace modicum
