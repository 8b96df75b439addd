// Results of torch.optim.Adam and AdamW, recorded by tests/fixtures/record_adamw.py.
#pragma once

#include <array>
#include <cstdint>

#include "modicum/kernels/kernels.h"

namespace modicum {

constexpr int64_t kTorchCount = 1003;
constexpr std::array<int64_t, 5> kTorchSteps = {1, 2, 10, 100, 1000};  // the steps of `after`
// Digests of the parameter, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq, recorded with
// square roots rounded to nearest.
using TorchDigests = std::array<uint64_t, 4>;
// The first elements of the parameter, recorded with torch's own square roots.
using TorchParams = std::array<float, 8>;
struct TorchRun {
  AdamOptions options;
  float unscale;
  float clip;
  std::array<TorchDigests, 5> after;  // after each of kTorchSteps
  TorchParams after_first;            // after step 1
  TorchParams after_last;             // after the last of kTorchSteps
};

constexpr std::array<TorchRun, 16> kTorchRuns = {{
#include "modicum/kernels/adamw_torch_double.inc"
}};

}  // namespace modicum
