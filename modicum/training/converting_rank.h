// The rank process of a conversion, which writes one file after the other. Internal to `training`.
#pragma once

#include <vector>

#include "modicum/training/convert.h"
#include "modicum/training/loading_rank.h"

namespace modicum {

// This process, as the owner of a journal.
SaveOwner owner_of_conversion();
bool is_owner_dead(const SaveOwner& owner);
// Takes the outcome of a publication into the report.
void add_published(ConvertReport& report, const Publication& published);

// The outcome of the rank. Plain data, since it is sent from the rank's process.
struct ConvertOutcome {
  RankOutcome load;  // sums over all files; peaks are the highest
  uint64_t written_bytes = 0;
  uint64_t kept_files = 0;  // finished by an earlier call
};

struct ConvertWorld : LoadWorld {
  // Each file's load has the options of the task's plan.
  ConvertWorld(const ConvertTask& convert_task, ConversionJournal& to)
      : LoadWorld(convert_task.load), convert(convert_task), conversion(to) {}

  const ConvertTask& convert;
  ConversionJournal& conversion;
};

class ConvertRank {
 public:
  ConvertRank(ConvertWorld& world, int rank);
  ConvertOutcome live();

 private:
  void convert_files();
  // Returns the digest of the file's targets.
  uint64_t convert(uint32_t file, ComparedChunks& read);
  // The targets of a file.
  struct LoadedTargets {
    uint64_t digest = 0;
    std::vector<TensorLoss> losses;
  };
  LoadedTargets load_targets(uint32_t file, const SaveFiles& to, ComparedChunks& read);
  void compare(ComparedChunks& read);
  const ConvertedForm& form() const noexcept { return world_.convert.form; }

  ConvertWorld& world_;
  const RankContext at_;
  const uint64_t baseline_bytes_;
  Ledger ledger_;
  ConvertOutcome outcome_;
};

}  // namespace modicum
