// A clock for tests: time passes only by sleep_ns and advance_ns. Not thread-safe.
#pragma once

#include <cstdint>

#include "modicum/base/clock.h"

namespace modicum {

class FakeClock final : public Clock {
 public:
  int64_t now_ns() override { return now_ns_; }
  void sleep_ns(int64_t duration_ns) override { now_ns_ += duration_ns; }
  void advance_ns(int64_t duration_ns) { now_ns_ += duration_ns; }

 private:
  int64_t now_ns_ = 0;
};

}  // namespace modicum
