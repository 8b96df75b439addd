// The report of this process to the `modicum watch` that it runs under. Part of the public header
// of `ranks`.
#pragma once

#include <cstdint>
#include <optional>

#include "modicum/base/base.h"
#include "modicum/io/io.h"
#include "modicum/memory/memory.h"

namespace modicum {

class OwnReport {
 public:
  // Claims a report in the table whose path is in the environment variable kWatchVariable. Until
  // then, and without a watcher, the reporter reports nothing. `baseline` returns the bytes that
  // this process holds now; it is called only if there is a watcher. Must be called once, by one
  // thread.
  void begin(FunctionRef<uint64_t()> baseline);

  // The result must not be used after this object is destroyed.
  const Reporter& reporter() const noexcept { return reporter_; }

 private:
  std::optional<SharedPages> pages_;
  Reporter reporter_;
};

}  // namespace modicum
