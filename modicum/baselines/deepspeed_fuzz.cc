// Reads any bytes as a ds_config.json, and makes a forecast if they are accepted. Errors other than
// INTERNAL are allowed.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "modicum/base/base.h"
#include "modicum/baselines/baselines.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace modicum;
  constexpr int kRanks = 4;
  constexpr std::array<int64_t, 3> kSizes = {1000, 7, 1 << 20};
  try {
    const DeepSpeedConfig config =
        read_deepspeed({reinterpret_cast<const char*>(data), size}, kRanks);
    static_cast<void>(deepspeed_forecast(config, kSizes, {.ranks = kRanks, .ranks_of_node = 2}));
  } catch (const Error& error) {
    MODICUM_ASSERT(error.category() != Category::internal);
  }
  return 0;
}
