// What the optimizer's state of a run holds, in words, and what another dtype or state format
// changes. Internal to `runs`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "modicum/recipe/recipe.h"
#include "modicum/spec/spec.h"

namespace modicum {

struct Run;

// The trained parameters of one dtype, and the format of those that are matrices.
struct ParametersOfDType {
  DType dtype = DType::f32;
  const StateFormatRow* row = nullptr;
  uint64_t numel = 0;
};
// By dtype, the one with the most elements first.
std::vector<ParametersOfDType> parameters_by_dtype(const Recipe& recipe, StateFormat asked);

// "adamw:fp32 over float32 parameters, as torch's AdamW over fp32 parameters: 16 bytes per
// parameter". About the dtype that most parameters have. "none" without an optimizer.
std::string optimizer_text(const Run& run);

// What a change of --dtype or of the state format costs.
struct StateChange {
  int loss = 0;      // 0: nothing is lost; otherwise the more, the higher
  std::string note;  // what stays the same, gets lost and changes otherwise; empty: no change
};
// From `run` to `other`, which is loaded with another dtype or is `run` itself, with `format`.
// Empty if no parameter's state would differ or take fewer bytes.
std::optional<StateChange> state_change(const Run& run, const Run& other,
                                        std::optional<StateFormat> format);

}  // namespace modicum
