// The optimizer on its own, in rank processes of this machine. Part of the door of `training`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/report/report.h"
#include "modicum/training/rank_processes.h"

namespace modicum {

// The bytes that all steps together read and write.
uint64_t bytes_to_move(const StepTask& task) noexcept;

// Errors as those of run_ranks; BUDGET before a rank is started.
StepReport step_in_ranks(const StepTask& task, const std::optional<Budget>& budget, ShowBytes show);

}  // namespace modicum
