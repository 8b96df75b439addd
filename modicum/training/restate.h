// An optimizer's state in another format, from file to file. Internal to `training`.
#pragma once

#include <cstdint>
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

// The planes of a step that change their format. Values are exported to fp32 and imported as by
// AdamW::export_to and import_from: with the saved seed and step counts, so the bits are those of
// loading the state into an AdamW of the new format.
//
// bf16 w, fp32 -> fp32-split            fp32 -> bf16-moments
//
//   master     -> w, w.master_low         as on the left
//   exp_avg    =  exp_avg                 exp_avg    -> exp_avg
//   exp_avg_sq =  exp_avg_sq              exp_avg_sq -> exp_avg_sq
//
// `->` is converted here, in windows of kElements; `=` is copied as any other tensor. All arguments
// must outlive it. One thread.
class Restate {
 public:
  // `from`, `to`: the state of the same parameters, in the same order. UNSUPPORTED, naming the
  // parameter, if its master changes, and `weights` has no tensor of its name and shape.
  Restate(const Checkpoint& weights, const Checkpoint& state, const StateFacts& facts,
          std::span<const StateOf> from, std::span<const StateOf> to);

  static constexpr int64_t kElements = 32768;
  // Charged to Purpose::staging while a file is written.
  static constexpr uint64_t kBytes = 1 * kMiB;

  // The names of weights whose bits may change.
  const std::set<std::string, std::less<>>& weights() const noexcept { return changed_weights_; }
  // Writes those tensors of a file that change. IO, NOSPACE, BUDGET; CONFLICT if a source has
  // changed.
  FileOutcome write(const FileToComplete& of) const;

 private:
  struct Parameter {
    TensorSpec spec;
    StateFormat from, to;
    bool is_master_from, is_master_to;
    int64_t steps;
  };
  struct Tensor;  // a stored plane, or its scales, and where they lie in a window
  struct Window;
  struct Places;

  static bool changes(const Parameter& of, StatePlane plane) noexcept;
  static std::vector<Tensor> tensors_of(const Parameter& of, StateFormat format, bool is_master,
                                        StatePlane plane);
  void convert(const Parameter& of, StatePlane plane, const std::vector<Tensor>& into,
               Places& places) const;

  const Checkpoint& weights_;
  const Checkpoint& state_;
  const uint64_t seed_;
  std::vector<Parameter> parameters_;
  std::map<std::string_view, uint32_t> weight_of_, plane_of_;  // by name, in the manifests
  std::set<std::string, std::less<>> changed_weights_;
};

}  // namespace modicum
