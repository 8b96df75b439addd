#include "modicum/kernels/kernels.h"
#include "modicum/kernels/wide.h"

namespace modicum {
namespace {

struct Scale {
  float* values;
  float factor;
  int64_t n;

  MODICUM_INLINE void operator()() const noexcept {
    float* const to = values;
    const float by = factor;
    const int64_t count = n;
    for (int64_t i = 0; i < count; ++i) to[i] *= by;
  }
};

}  // namespace

void scale(float* values, float factor, int64_t n) noexcept {
  run_widest(Scale{values, factor, n});
}

}  // namespace modicum
