// The interface to time. Code that measures or waits gets a Clock, so that tests control the time
// (clock_double.h). Monotonic: jumps of the wall clock have no effect.
#pragma once

#include <cstdint>

namespace modicum {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() = 0;  // from an arbitrary origin; compare differences only
  virtual void sleep_ns(int64_t duration_ns) = 0;
};

// CLOCK_MONOTONIC, the same in all processes of the machine. Any thread.
class SteadyClock final : public Clock {
 public:
  int64_t now_ns() override;
  void sleep_ns(int64_t duration_ns) override;
};

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kNsPerMs = 1'000'000;

}  // namespace modicum
