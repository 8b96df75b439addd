#include "modicum/optim/norm.h"

#include <algorithm>
#include <cmath>

namespace modicum {

float clip_factor(double norm, double max_norm) noexcept {
  return static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6)));
}

float LossScale::unscale() const noexcept {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

void LossScale::update(bool finite) noexcept {
  if (!finite) {
    scale *= backoff_factor;
    clean_steps = 0;
    return;
  }
  if (++clean_steps < growth_interval) return;
  if (const float grown = scale * growth_factor; std::isfinite(grown)) scale = grown;
  clean_steps = 0;
}

}  // namespace modicum
