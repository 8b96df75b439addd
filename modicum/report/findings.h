// Parts of the rules of `doctor`. Internal to `report`.
#pragma once

#include <cstdint>
#include <vector>

#include "modicum/report/doctor.h"

namespace modicum {

using Found = std::vector<Finding>;

// What the tightest limit has left.
uint64_t available_bytes(const DoctorFacts& facts);
// Whether that is more than a GiB, or than a tenth of the memory left.
bool is_large(const DoctorFacts& facts, uint64_t bytes);
// Expects facts.program.
void add_program_findings(const DoctorFacts& facts, Found& found);

}  // namespace modicum
