// The memory in which watched processes report about themselves (spec/self_report.h).
//
// The watcher makes it and sets kWatchVariable to its path, /proc/PID/fd/N, which is inherited. It
// is sealed: it can't be truncated, so that a store into it never fails. There is no file that a
// killed watcher could leave behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "modicum/base/base.h"
#include "modicum/spec/spec.h"

namespace modicum {

constexpr const char* kWatchVariable = "MODICUM_WATCH";

// The table, mapped. Move-only.
class ReportPages {
 public:
  // IO if the kernel refuses.
  static ReportPages make();
  // The one that another process of this user has made. nullopt for any other path or file, which
  // is neither written nor waited for.
  static std::optional<ReportPages> open(const std::string& path) noexcept;
  ReportPages(ReportPages&& other) noexcept;
  ReportPages& operator=(ReportPages&&) = delete;
  ~ReportPages();

  SelfReports& table() const noexcept { return *table_; }
  std::string path() const;  // for other processes, while this object lives; only after `make`

 private:
  ReportPages(int fd, std::span<std::byte> memory, SelfReports* table) noexcept
      : fd_(fd), memory_(memory), table_(table) {}
  int fd_;  // -1 after `open`
  std::span<std::byte> memory_;
  SelfReports* table_;
};

// This process's report to the `modicum watch` that runs it, if one does.
class OwnReport {
 public:
  // Until then, and without a watcher, the reporter reports nothing. `baseline` returns the bytes
  // that this process holds now; it is called if it is watched. Once.
  void begin(FunctionRef<uint64_t()> baseline);

  const Reporter& reporter() const noexcept { return reporter_; }

 private:
  std::optional<ReportPages> pages_;
  Reporter reporter_;
};

}  // namespace modicum
