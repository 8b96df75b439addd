#include "modicum/watch/cage.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

namespace modicum {
namespace {

// Whether a kernel file of one line contains `word` between spaces.
bool has_word(const std::string& file, std::string_view word) {
  std::string text = read_kernel_text(file).value_or("");
  if (text.ends_with('\n')) text.pop_back();
  return fmt::format(" {} ", text).find(fmt::format(" {} ", word)) != std::string::npos;
}

std::optional<uint64_t> number_of(const std::string& file) {
  const std::string text = read_kernel_text(file).value_or("");
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

[[noreturn]] void refuse(const MemoryCgroup& where, const std::string& why) {
  fail(Category::io,
       fmt::format("cannot make a memory cgroup in {} for --limit: {}", where.directory, why));
}

// Returns the v2 cgroup in which a cgroup with a limit can be made. `chain`: from memory_cgroups.
const MemoryCgroup& parent_in_v2(const std::vector<MemoryCgroup>& chain) {
  const MemoryCgroup& cgroup = chain.front();
  const std::string control = cgroup.directory + "/cgroup.subtree_control";
  if (has_word(control, "memory") || write_kernel_text(control, "+memory")) return cgroup;
  const bool has_limit = number_of(cgroup.directory + "/memory.max").has_value() ||
                         number_of(cgroup.directory + "/memory.high").has_value();
  if (chain.size() < 2 || has_limit) {
    refuse(cgroup, has_limit ? "it has processes and a limit of its own"
                             : "the memory controller is not delegated to it");
  }
  return chain[1];
}

}  // namespace

MemoryCage::MemoryCage(FileSystem& files, uint64_t limit_bytes, std::string root)
    : files_(files), root_(std::move(root)) {
  const std::vector<MemoryCgroup> chain = memory_cgroups(root_);
  if (chain.empty()) fail(Category::io, "cannot limit memory: no memory cgroup is mounted");
  origin_ = chain.front();
  const MemoryCgroup& parent = origin_.version == 2 ? parent_in_v2(chain) : origin_;
  // A pid is unique within a container only, and is reused; a killed process leaves its cgroup.
  const uint64_t started = identify_process(::getpid()).started;
  make_below(parent,
             fmt::format("modicum-watch-{}-{:x}-{:x}", ::getpid(), pid_namespace(), started));
  try {
    write_limit(limit_bytes);
  } catch (const Error&) {
    files_.remove(group_.directory);
    throw;
  }
}

void MemoryCage::make_below(const MemoryCgroup& parent, const std::string& name) {
  group_ = {.version = parent.version,
            .name = (parent.name == "/" ? "" : parent.name) + "/" + name,
            .directory = real_directory(files_, parent.directory) + "/" + name};
  try {
    files_.make_directory(group_.directory);
  } catch (const Error& error) {
    refuse(parent, error.what_happened());
  }
}

void MemoryCage::write_limit(uint64_t limit_bytes) {
  const std::string text = std::to_string(limit_bytes);
  const char* const name = group_.version == 1 ? "/memory.limit_in_bytes" : "/memory.max";
  const std::string file = group_.directory + name;
  if (!write_kernel_text(file, text)) {
    fail(Category::io, fmt::format("cannot limit a new memory cgroup: cannot write {}", file));
  }
  // A kernel without swap accounting lacks these files.
  if (group_.version == 1) {
    write_kernel_text(group_.directory + "/memory.memsw.limit_in_bytes", text);
  } else {
    write_kernel_text(group_.directory + "/memory.swap.max", "0");
  }
}

MemoryCage::~MemoryCage() {
  // A killed process leaves its cgroup a little after it can be waited for: retries for a second.
  for (int attempt = 0; attempt < 200; ++attempt) {
    std::string left = read_kernel_text(entry()).value_or("");
    while (!left.empty()) {
      const size_t end = std::min(left.find('\n'), left.size());
      write_kernel_text(origin_.directory + "/cgroup.procs", left.substr(0, end));
      left.erase(0, end + 1);
    }
    try {
      files_.remove(group_.directory);
      return;
    } catch (const Error&) {
      ::usleep(5000);
    }
  }
}

}  // namespace modicum
