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

// Whether any target needs `stored`; whether one does so for its elements. Scales of codes that are
// dequantised are needed, and it may be that no target has their elements.
bool is_needed(const Plan& plan, uint32_t stored) noexcept;
bool gives_elements(const Plan& plan, uint32_t stored) noexcept;
// The scale that must be at hand where elements of `stored` are put in place; nothing where no
// target dequantises them.
std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept;
// The part of the stored scales that a transfer needs: whole rows of their grid, or some of one
// row. Empty where nothing is dequantised.
Extent scale_extent(const Plan& plan, const Transfer& transfer);

}  // namespace modicum
