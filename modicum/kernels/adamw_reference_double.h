// AdamW as docs/internals/numerics.md defines it, one element at a time: the reference of the
// kernels' tests.
#pragma once

#include "modicum/kernels/kernels.h"

namespace modicum {

void reference_adamw(const AdamNumbers& numbers, const AdamSpan& span);
GradNorm reference_squares(const std::byte* grad, DType dtype, int64_t n);

// The random word of an element.
uint32_t reference_word(uint64_t seed, int64_t step, uint64_t parameter, int64_t index,
                        int64_t row = 0);

}  // namespace modicum
