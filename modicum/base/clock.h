// The interface to the system's monotonic clock. Tests of code that is given a Clock can control
// the time (clock_double.h).
#pragma once

#include <cstdint>

namespace modicum {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() = 0;  // since an arbitrary origin; only differences have a meaning
  virtual void sleep_ns(int64_t duration_ns) = 0;
};

// CLOCK_MONOTONIC, so that all processes of a machine read the same time, and changes of the wall
// clock have no effect. May be used by several threads at a time.
class SteadyClock final : public Clock {
 public:
  int64_t now_ns() override;
  void sleep_ns(int64_t duration_ns) override;
};

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kNsPerMs = 1'000'000;

}  // namespace modicum
