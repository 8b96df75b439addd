// Optimizer steps without a model, in rank processes of this machine. Part of the public header of
// `training`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/report/report.h"
#include "modicum/training/rank_processes.h"

namespace modicum {

// The bytes that all ranks read and write in all steps.
uint64_t bytes_to_move(const StepTask& task) noexcept;

// Throws BUDGET, before a rank is started, if the steps do not fit; and the errors of run_ranks.
StepReport step_in_ranks(const StepTask& task, const std::optional<Budget>& budget,
                         RankRunner run_ranks, ShowBytes show);

}  // namespace modicum
