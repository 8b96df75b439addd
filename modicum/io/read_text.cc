#include "modicum/io/read_text.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "modicum/io/descriptor.h"

namespace modicum {
namespace {

// Long files such as smaps need fewer calls with a block of several pages.
constexpr size_t kBlockBytes = 16 * kKiB;

// Calls `take` with each block of a file until it returns false. Returns whether the file was read
// to its end.
bool read_blocks(const std::string& path, FunctionRef<bool(std::string_view)> take) {
  const Descriptor file = Descriptor::open(path.c_str(), O_RDONLY);
  if (!file.is_valid()) return false;
  std::array<char, kBlockBytes> block;
  while (true) {
    const ssize_t got =
        uninterrupted([&] { return ::read(file.get(), block.data(), block.size()); });
    if (got <= 0) return got == 0;
    if (!take({block.data(), static_cast<size_t>(got)})) return false;
  }
}

}  // namespace

std::optional<std::string> read_kernel_text(const std::string& path) {
  std::string text;
  const bool is_read = read_blocks(path, [&](std::string_view block) {
    text += block;
    return text.size() <= kLongestKernelText;
  });
  return is_read ? std::optional(std::move(text)) : std::nullopt;
}

bool for_each_kernel_line(const std::string& path, FunctionRef<void(std::string_view)> line) {
  std::string text;  // the begin of a line whose end is not read yet
  const bool is_read = read_blocks(path, [&](std::string_view block) {
    text += block;
    std::string_view left = text;
    for (size_t end = left.find('\n'); end != left.npos; end = left.find('\n')) {
      line(left.substr(0, end));
      left.remove_prefix(end + 1);
    }
    text.erase(0, text.size() - left.size());
    return text.size() <= kLongestKernelText;
  });
  if (is_read && !text.empty()) line(text);
  return is_read;
}

bool write_kernel_text(const std::string& path, const std::string& text) {
  const Descriptor file = Descriptor::open(path.c_str(), O_WRONLY);
  if (!file.is_valid()) return false;
  const ssize_t written =
      uninterrupted([&] { return ::write(file.get(), text.data(), text.size()); });
  return written == static_cast<ssize_t>(text.size());
}

std::optional<FileSystemSpace> space_of(const std::string& path) {
  struct statvfs found {};
  const int result = uninterrupted([&] { return ::statvfs(path.c_str(), &found); });
  if (result != 0) return std::nullopt;
  const uint64_t block = found.f_frsize;
  return FileSystemSpace{.size_bytes = saturating_mul(found.f_blocks, block),
                         .free_bytes = saturating_mul(found.f_bavail, block)};
}

namespace {

std::string identity_text(const FileIdentity& identity) {
  return fmt::format("{} bytes, device {}, inode {}, mtime {} ns, ctime {} ns", identity.size_bytes,
                     identity.device, identity.inode, identity.mtime_ns, identity.ctime_ns);
}

}  // namespace

std::string read_text(File& file, uint64_t most_bytes, Category too_long) {
  const FileIdentity before = file.identity();
  if (before.size_bytes > most_bytes) {
    fail(too_long, "the file is too long",
         {.file = file.name(),
          .expected = fmt::format("at most {} bytes", most_bytes),
          .got = fmt::format("{} bytes", before.size_bytes)});
  }
  std::string text(before.size_bytes, '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  require_unchanged(file, before);
  return text;
}

void read_in_blocks(File& file, uint64_t bytes,
                    FunctionRef<void(std::span<const std::byte> block, uint64_t at)> fn) {
  std::array<std::byte, kBlockBytes> room;
  for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
    const auto block = std::span(room).first(std::min<uint64_t>(kBlockBytes, bytes - at));
    file.read(block, at);
    fn(block, at);
  }
}

void require_unchanged(File& file, const FileIdentity& before) {
  const FileIdentity identity = file.identity();
  if (identity == before) return;
  fail(Category::conflict, "the file has changed since it was first read",
       {.file = file.name(), .expected = identity_text(before), .got = identity_text(identity)});
}

}  // namespace modicum
