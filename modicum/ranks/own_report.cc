#include "modicum/ranks/own_report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace modicum {

void OwnReport::begin(FunctionRef<uint64_t()> baseline) {
  const char* const path = std::getenv(kWatchVariable);
  if (path == nullptr) return;
  auto opened = SharedPages::open(path, sizeof(SelfReports));
  if (!opened) return;
  SelfReports* const table = SelfReports::find_in(opened->bytes());
  if (table == nullptr) return;
  pages_.emplace(std::move(*opened));
  const uint64_t held_bytes = baseline();
  // The mark must precede the claim: if a process has a report but no mark, the watcher concludes
  // that the program which claimed the report has since replaced itself by exec.
  if (!pages_->mark()) return;
  const uint64_t retained_bytes = std::min(held_bytes, retained_heap_bytes());
  SelfReport* const report = table->claim(getpid(), held_bytes - retained_bytes);
  if (report == nullptr) return;
  report->retained_heap_bytes.store(retained_bytes);
  reporter_ = Reporter(*report, getpid());
}

}  // namespace modicum
