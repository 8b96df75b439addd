// The rank process of a conversion, which writes one file after the other. Internal to `training`.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "modicum/training/convert.h"
#include "modicum/training/loading_rank.h"

namespace modicum {

// This process, as the owner of a journal.
StepOwner owner_of_conversion();
bool is_owner_dead(const StepOwner& owner);
// Takes the outcome of a publication into the report.
void add_published(ConvertReport& report, const Published& published);

// A file of which some tensors have no target, and are yet to be written. They are planes of an
// optimizer's state in a new format: master weights, exp_avg or exp_avg_sq.
struct FileToComplete {
  const Manifest& manifest;
  uint32_t file = 0;
  const SaveFiles& to;
  ChunkSums& sums;  // for `manifest`; must receive the writes
  Ledger& ledger;
  FunctionRef<void(uint64_t bytes)> beat;
};
struct FileOutcome {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

// A part of the output: the files of one form. What the members refer to must outlive the
// conversion.
struct ConvertPart {
  const Checkpoint& source;
  const Recipe& recipe;
  const ConvertedForm& form;
  std::string folder;  // in the output: "", or "optimizer/"
  bool keeps_holes = false;
  // Set if the output is a step (a saved checkpoint directory); the journal then records the
  // chunks' digests. Called for each written tensor; throws if its values are not the expected
  // ones.
  std::function<void(const ChunkSums& sums, uint32_t tensor)> checks;
  // Writes the tensors of a file that have no target; empty if no tensor lacks one. Requires
  // `checks`.
  std::function<FileOutcome(const FileToComplete& of)> completes;
  bool allow_overflow = false;  // see ConvertTask
};

// The outcome of the rank. Plain data, since it is sent from the rank's process.
struct Converted {
  RankOutcome load;  // sums over all files; peaks are the highest
  uint64_t written_bytes = 0;
  uint64_t kept_files = 0;  // finished by an earlier call
};

struct ConvertWorld : LoadWorld {
  // `besides`: the memory of the parts in addition to that of their loads. Each load has the
  // options of `load`'s plan.
  ConvertWorld(const LoadTask& load, std::vector<ConvertPart> of, const Footprint& besides,
               ConversionJournal& to)
      : LoadWorld(load), parts(std::move(of)), held(besides), conversion(to) {}

  const std::vector<ConvertPart> parts;
  const Footprint held;
  ConversionJournal& conversion;
};

class ConvertRank {
 public:
  ConvertRank(ConvertWorld& world, int rank);
  Converted live();

 private:
  void convert(const ConvertPart& part);
  // The targets of a file.
  struct Loaded {
    uint64_t digest = 0;
    std::vector<TensorLoss> losses;
  };
  // The sums of the written and of the read elements, if needed.
  struct Sums {
    ChunkSums* written = nullptr;
    Compared* read = nullptr;
  };
  // Returns the digest of the file's targets.
  uint64_t convert(const ConvertPart& part, uint32_t file, const Sums& sums);
  Loaded load_targets(const ConvertPart& part, uint32_t file, const SaveFiles& to,
                      const Sums& sums);
  void compare(const ConvertPart& part, Compared& read);

  ConvertWorld& world_;
  const RankContext at_;
  const uint64_t baseline_bytes_;
  Ledger ledger_;
  Converted outcome_;
};

}  // namespace modicum
