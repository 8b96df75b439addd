// The seam for time. Everything that measures or waits takes a Clock, so that tests can decide what
// time it is (clock_double.h). Monotonic only: a jump of the wall clock has no effect anywhere.
#pragma once

#include <cstdint>

namespace modicum {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() = 0;  // monotonic; only differences mean something
  virtual void sleep_ns(int64_t duration_ns) = 0;
};

// CLOCK_MONOTONIC, which forked processes share. Any thread.
class SteadyClock final : public Clock {
 public:
  int64_t now_ns() override;
  void sleep_ns(int64_t duration_ns) override;
};

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kNsPerMs = 1'000'000;

}  // namespace modicum
