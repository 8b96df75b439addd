// Converts a checkpoint without holding it: a load whose elements go straight into files. Part of
// the door of `training`.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "modicum/training/load_ranks.h"

namespace modicum {

// The files of a conversion: every target of a recipe, unsharded, under its own name.
class ConvertedForm {
 public:
  struct Options {
    // Without it, files are divided as in the source: a target goes into the file of its first
    // stored tensor.
    std::optional<uint64_t> shard_bytes;
    std::string_view stem = kModelStem;  // of the files' names
    // Names whose tensors are in the files, but are not written from the recipe's targets.
    std::set<std::string, std::less<>> without;
  };
  ConvertedForm(const Checkpoint& source, const Recipe& recipe, const Options& of);
  // Files of any tensors: a tensor whose name, dtype and shape are a target's is written from it.
  ConvertedForm(Manifest manifest, const Recipe& recipe);

  const Manifest& manifest() const noexcept { return manifest_; }
  // Host memory of a conversion besides that of its loads.
  Footprint footprint(const Plan& plan) const;
  // For each target the index of its tensor in the manifest; UINT32_MAX for aliases, and for
  // targets that no tensor is written from.
  std::span<const uint32_t> places() const noexcept { return places_; }
  // The targets of file `file`, each followed by its aliases.
  std::span<const uint32_t> targets_of(uint32_t file) const noexcept { return targets_[file]; }

 private:
  void place(const Recipe& recipe, const std::set<std::string, std::less<>>& without);

  Manifest manifest_;
  std::vector<uint32_t> places_;
  std::vector<std::vector<uint32_t>> targets_;  // by file
};

struct ConvertTask {
  LoadTask load;  // of one rank that holds every target unsharded, with Destination::copy
  const ConvertedForm& form;
  std::string out;
  bool keeps_holes = false;
};
// Converts in a rank process, one file after the other. On failure `out` does not exist; a later
// call with the same inputs keeps the finished files. Errors as those of run_ranks and
// ConversionJournal.
ConvertReport convert_in_rank(const ConvertTask& task, ShowBytes show);

}  // namespace modicum
