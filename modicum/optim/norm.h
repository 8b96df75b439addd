// The clip factor and the loss scale. They share no state, so any thread may use them.
#pragma once

namespace modicum {

// min(1, max_norm / (norm + 1e-6)) as in torch.nn.utils.clip_grad_norm_, computed in fp64 and
// rounded to fp32 once. `max_norm` is 0 or more; infinity does not clip.
float clip_factor(double norm, double max_norm) noexcept;

// The loss scale of torch.amp.GradScaler: a step with a non-finite gradient multiplies `scale` by
// `backoff_factor`; `growth_interval` finite steps in a row multiply it by `growth_factor`, unless
// that gives infinity.
struct LossScale {
  float scale = 65536.0F;
  float growth_factor = 2.0F;
  float backoff_factor = 0.5F;
  int growth_interval = 2000;
  int clean_steps = 0;  // finite steps since the last overflow or growth

  float unscale() const noexcept;     // 1 / scale, rounded once
  void update(bool finite) noexcept;  // after a step: whether all its gradients were finite
  bool operator==(const LossScale&) const = default;
};

}  // namespace modicum
