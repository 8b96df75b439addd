// Converts an optimizer's state to another format, from file to file. Internal to `training`.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/checkpoint/checkpoint.h"
#include "modicum/training/converting_rank.h"
#include "modicum/training/state_files.h"

namespace modicum {

// Converts the planes of an optimizer's state (a parameter's master, exp_avg and exp_avg_sq) whose
// format changes. Their values are converted to fp32 and from there to the new format, as by
// AdamW::export_to and import_from with the saved seed and step counts. The bits are therefore
// those of an AdamW of the new format that has imported the state of the old format.
//
// Example: the state of a bf16 parameter `w`, which has a master of its own in format fp32.
//
//   from fp32 to fp32-split               from fp32 to bf16-moments
//   master     -> w and w.master_low      master     -> w and w.master_low
//   exp_avg    =  exp_avg                 exp_avg    -> exp_avg
//   exp_avg_sq =  exp_avg_sq              exp_avg_sq -> exp_avg_sq
//
// Planes with `->` are converted here, at most kElements at a time; planes with `=` are copied
// like any other tensor. `weights` and `state` must outlive the object. Not thread-safe.
class Restate {
 public:
  // `from`, `to`: the state of the same parameters, in the same order. Throws UNSUPPORTED, naming
  // the parameter, if its master changes and `weights` has no tensor of its name, dtype and shape.
  Restate(const Checkpoint& weights, const Checkpoint& state, const StateFacts& facts,
          std::span<const StateOf> from, std::span<const StateOf> to);

  static constexpr int64_t kElements = 32768;
  // Charged to Purpose::staging while a file is written.
  static constexpr uint64_t kBytes = 1 * kMiB;

  // The host memory of this object and of `write`. `written`: the manifests of the files to write.
  uint64_t held_bytes(std::initializer_list<const Manifest*> written) const;

  // The names of weights whose bits may change.
  const std::set<std::string, std::less<>>& weights() const noexcept { return changed_weights_; }
  // Writes those tensors of a file whose format changes. Throws IO, NOSPACE, BUDGET, FORMAT.TRUNC;
  // CONFLICT if a source file has changed.
  FileOutcome write(const FileToComplete& of) const;

 private:
  struct Parameter {
    TensorSpec spec;
    StateFormat from, to;
    bool is_master_from, is_master_to;
    int64_t steps;
  };
  struct Tensor;  // a stored tensor (a plane, its scales, or the weight) and its slot in a window
  struct Window;
  struct Places;  // window, readers and writer of one call of `write`

  static bool changes(const Parameter& of, StatePlane plane) noexcept;
  // The tensors in which `format` stores the plane, and for a master also the weight.
  static std::vector<Tensor> tensors_of(const Parameter& of, StateFormat format, bool is_master,
                                        StatePlane plane);
  // Converts a plane of a parameter, and writes the tensors `into`.
  void convert(const Parameter& of, StatePlane plane, const std::vector<Tensor>& into,
               Places& places) const;

  const Checkpoint& weights_;
  const Checkpoint& state_;
  const uint64_t seed_;
  std::vector<Parameter> parameters_;
  std::map<std::string_view, uint32_t> weight_of_, plane_of_;  // index in the manifest, by name
  std::set<std::string, std::less<>> changed_weights_;
};

}  // namespace modicum
