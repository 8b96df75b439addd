// The clip factor and the loss scale. Values; any thread.
#pragma once

namespace modicum {

// min(1, max_norm / (norm + 1e-6)) as in torch, in fp64, rounded once. `max_norm` is 0 or more;
// infinity does not clip.
float clip_factor(double norm, double max_norm) noexcept;

// The scale of torch.amp.GradScaler: a step with a non-finite gradient is skipped and halves
// `scale`, `growth_interval` finite steps in a row double it.
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
