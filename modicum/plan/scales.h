// Inside the room `plan`: which targets need which scales.
#pragma once

#include <optional>

#include "modicum/plan/plan.h"

namespace modicum {

// Every target that dequantises has scales that fit: else UNSUPPORTED (none) or MISMATCH, naming
// the codes.
void prove_scales(const Plan& plan);
// The scale that `target` needs beside codes `stored`, which it takes; nothing where it takes them
// as they are.
std::optional<uint32_t> scale_for(const Plan& plan, uint32_t target, uint32_t stored) noexcept;
// Whether a target that needs `stored` does so for its elements, and not as a scale.
bool takes_elements(const Plan& plan, uint32_t target, uint32_t stored) noexcept;

}  // namespace modicum
