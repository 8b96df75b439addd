// One checkpoint into another, without holding it: a load whose elements go straight into files.
// Part of the door of `training`.
#pragma once

#include <optional>
#include <string>

#include "modicum/training/load_ranks.h"

namespace modicum {

// The files of a conversion: every target of a recipe, whole, under its own name. Values.
class ConvertedForm {
 public:
  // Without `shard_bytes`, a tensor is in the file that its first stored tensor was in.
  ConvertedForm(const Checkpoint& source, const Recipe& recipe,
                std::optional<uint64_t> shard_bytes = std::nullopt);

  const Manifest& manifest() const noexcept { return manifest_; }
  // Host memory that a conversion holds besides that of its loads.
  Footprint footprint(const Plan& plan) const;
  // The tensor of each target in the manifest; UINT32_MAX for aliases.
  std::span<const uint32_t> places() const noexcept { return places_; }
  // The targets of file `file`, each followed by its aliases.
  std::span<const uint32_t> targets_of(uint32_t file) const noexcept { return targets_[file]; }

 private:
  Manifest manifest_;
  std::vector<uint32_t> places_;
  std::vector<std::vector<uint32_t>> targets_;  // by file
};

struct ConvertTask {
  LoadTask load;  // by one rank that holds every target whole, with Destination::copy
  const ConvertedForm& form;
  std::string out;
  bool keeps_holes = false;
};
// Converts in a rank process, one file after the other. On failure nothing is visible at `out`; a
// later call with the same inputs keeps the files that were finished. Errors as run_ranks', and
// those of ConversionJournal.
ConvertReport convert_in_rank(const ConvertTask& task, ShowBytes show);

}  // namespace modicum
