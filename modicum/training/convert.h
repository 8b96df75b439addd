// Converts a checkpoint without holding it in memory: a load that writes its elements into files.
// Part of the public header of `training`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "modicum/training/load_ranks.h"

namespace modicum {

// The files of a conversion: every target of a recipe, unsharded, under its own name. The files
// have the stem of the source's.
class ConvertedForm {
 public:
  // `shard_bytes`: the largest size of a file. If empty, the source's division into files is kept:
  // a target goes into the file of its first stored tensor.
  ConvertedForm(const Checkpoint& source, const Recipe& recipe,
                std::optional<uint64_t> shard_bytes);

  const Manifest& manifest() const noexcept { return manifest_; }
  // Host memory of a conversion in addition to that of its loads.
  Footprint footprint(const Plan& plan) const;
  // For each target the index of its tensor in the manifest; UINT32_MAX for aliases.
  std::span<const uint32_t> places() const noexcept { return places_; }
  // The targets of file `file`, each followed by its aliases.
  std::span<const uint32_t> targets_of(uint32_t file) const noexcept { return targets_[file]; }

 private:
  Manifest manifest_;
  std::vector<uint32_t> places_;
  std::vector<std::vector<uint32_t>> targets_;  // by file
};

struct ConvertTask {
  LoadTask load;  // one rank, which holds every target unsharded; Destination::copy
  const ConvertedForm& form;
  std::string out;
  bool keeps_holes = false;     // see FileSink::Options
  bool allow_overflow = false;  // else a finite value that becomes infinite is an error
  bool adopts = false;          // see ConversionJournal::Inputs
};
// Converts in a rank process, one file after the other. After a failure `out` does not exist, but a
// later call with the same inputs continues after the finished files; its report has the losses of
// all files. Throws MISMATCH for an overflow that is not allowed, naming the first element of the
// first tensor of a file; INTEGRITY if a value of a checkpoint is not the saved one; the errors of
// run_ranks and ConversionJournal.
ConvertReport convert_in_rank(const ConvertTask& task, ShowBytes show);

}  // namespace modicum
