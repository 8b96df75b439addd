// What the two files of rules of `doctor` share. Internal to `report`.
#pragma once

#include <cstdint>
#include <vector>

#include "modicum/report/doctor.h"

namespace modicum {

using Findings = std::vector<Finding>;

// The available bytes of the limit with the fewest available bytes; UINT64_MAX without a limit.
uint64_t available_bytes(const DoctorFacts& facts);
// Whether `bytes` is more than 1 GiB or more than a tenth of available_bytes.
bool is_large(const DoctorFacts& facts, uint64_t bytes);
// Adds the findings about facts.before and facts.after, if both were read.
void add_growth_findings(const DoctorFacts& facts, Findings& found);
// Adds the findings about facts.program, which must be set.
void add_program_findings(const DoctorFacts& facts, Findings& found);

}  // namespace modicum
