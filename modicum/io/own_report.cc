#include "modicum/io/own_report.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdlib>
#include <utility>

#include "modicum/io/descriptor.h"
#include "modicum/io/errno_error.h"

namespace modicum {
namespace {

std::span<std::byte> mapped(int fd) noexcept {
  void* const at = mmap(nullptr, sizeof(SelfReports), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return {};
  return {static_cast<std::byte*>(at), sizeof(SelfReports)};
}

bool has_our_size(const struct stat& of) noexcept {
  return S_ISREG(of.st_mode) && of.st_size == static_cast<off_t>(sizeof(SelfReports));
}

}  // namespace

ReportPages ReportPages::make() {
  Descriptor made(memfd_create(kWatchVariable, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.is_valid() || ftruncate(made.get(), sizeof(SelfReports)) != 0 ||
      fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail_errno(errno, "cannot make memory for the reports of watched processes");
  }
  const std::span<std::byte> memory = mapped(made.get());
  if (memory.empty()) fail_errno(errno, "cannot map the reports of watched processes");
  return {made.release(), memory, &SelfReports::make_in(memory)};
}

std::optional<ReportPages> ReportPages::open(const std::string& path) noexcept {
  struct stat status {};
  // Before it is opened, which could wait for a FIFO, or start a device.
  if (stat(path.c_str(), &status) != 0 || !has_our_size(status)) return std::nullopt;
  const Descriptor file = Descriptor::open(path.c_str(), O_RDWR | O_NONBLOCK);
  if (!file.is_valid() || fstat(file.get(), &status) != 0 || !has_our_size(status)) {
    return std::nullopt;
  }
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return std::nullopt;
  const std::span<std::byte> memory = mapped(file.get());
  if (memory.empty()) return std::nullopt;
  ReportPages pages(-1, memory, SelfReports::find_in(memory));
  if (pages.table_ == nullptr) return std::nullopt;
  return pages;
}

ReportPages::ReportPages(ReportPages&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      memory_(std::exchange(other.memory_, {})),
      table_(std::exchange(other.table_, nullptr)) {}

ReportPages::~ReportPages() {
  if (!memory_.empty()) munmap(memory_.data(), memory_.size());
  if (fd_ >= 0) close(fd_);
}

std::string ReportPages::path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_); }

void OwnReport::begin(FunctionRef<uint64_t()> baseline) {
  const char* const path = std::getenv(kWatchVariable);
  if (path == nullptr) return;
  auto opened = ReportPages::open(path);
  if (!opened) return;
  pages_.emplace(std::move(*opened));
  SelfReport* const report = pages_->table().claim(getpid(), baseline());
  if (report != nullptr) reporter_ = Reporter(*report, getpid());
}

}  // namespace modicum
