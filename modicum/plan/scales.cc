// Finds the scales that are read with FP8 codes.
#include "modicum/plan/inside.h"

#include <fmt/format.h>

#include <algorithm>

namespace modicum {
namespace {

[[noreturn]] void refuse(const Plan& plan, const StoredTensor& codes, const Target& target) {
  if (!codes.scale) {
    fail(Category::unsupported,
         fmt::format("FP8 codes without a scale can't become {}", torch_name(target.spec.dtype)),
         {.tensor = codes.spec.fqn});
  }
  const TensorSpec& scale = plan.manifest->tensors[codes.scale->tensor].spec;
  fail(
      Category::mismatch,
      fmt::format("the block size of FP8 codes is neither in config.json nor determined by the "
                  "grid of '{}'",
                  printable(scale.fqn)),
      {.tensor = codes.spec.fqn,
       .expected = fmt::format("weight_block_size in config.json, or a grid that exactly one block "
                               "size gives for codes of {}",
                               shape_text(codes.spec.shape)),
       .got = shape_text(scale.shape)});
}

}  // namespace

void prove_scales(const Plan& plan) {
  for (const uint32_t t : plan.order) {
    const Target& target = plan.recipe->targets[t];
    if (!is_dequantised(*plan.recipe, target)) continue;
    for (const uint32_t stored : stored_under(*plan.recipe, target.root)) {
      const StoredTensor& codes = plan.manifest->tensors[stored];
      if (!codes.scale || !codes.scale->fits()) refuse(plan, codes, target);
    }
  }
}

std::optional<uint32_t> scale_for(const Plan& plan, uint32_t target, uint32_t stored) noexcept {
  const std::optional<BlockScale>& scale = plan.manifest->tensors[stored].scale;
  if (!scale || !is_dequantised(*plan.recipe, plan.recipe->targets[target])) return std::nullopt;
  return scale->tensor;
}

// Ops keep the dtype, so elements come from tensors of the root's dtype. Scales, the only other
// tensors that a target uses, never have the dtype of codes.
bool takes_elements(const Plan& plan, uint32_t target, uint32_t stored) noexcept {
  const Node& root = plan.recipe->nodes[plan.recipe->targets[target].root];
  return root.dtype == plan.manifest->tensors[stored].spec.dtype;
}

bool is_needed(const Plan& plan, uint32_t stored) noexcept {
  return !plan.uses.targets_of(stored).empty();
}

bool gives_elements(const Plan& plan, uint32_t stored) noexcept {
  const auto uses = plan.uses.targets_of(stored);
  return std::any_of(uses.begin(), uses.end(),
                     [&](uint32_t target) { return takes_elements(plan, target, stored); });
}

std::optional<uint32_t> scale_beside(const Plan& plan, uint32_t stored) noexcept {
  for (const uint32_t target : plan.uses.targets_of(stored)) {
    if (const auto scale = scale_for(plan, target, stored)) return scale;
  }
  return std::nullopt;
}

Extent scale_extent(const Plan& plan, const Transfer& transfer) {
  if (!transfer.dequantises()) return {};
  const StoredTensor& codes = plan.manifest->tensors[transfer.from];
  const StoredTensor& scales = plan.manifest->tensors[codes.scale->tensor];
  const ScaleGrid grid = scale_grid(*plan.manifest, codes);
  const Runs& runs = transfer.runs;
  const int64_t first = runs.first;
  const int64_t last = first + runs.span() - 1;
  if (first / grid.codes[1] == last / grid.codes[1]) {  // one row of codes
    const int64_t begin = grid.index_of(first);
    return extent_of(scales, begin, grid.index_of(last) + 1 - begin);
  }
  const int64_t begin = grid.row_of(first);
  const int64_t rows = grid.row_of(last) + 1 - begin;
  return extent_of(scales, begin * grid.scales[1], rows * grid.scales[1]);
}

}  // namespace modicum
