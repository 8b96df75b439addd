#include "modicum/checkpoint/blob.h"

#include <fmt/format.h>
#include <nettle/sha2.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <vector>

namespace modicum {
namespace {

constexpr size_t kReadBytes = kMiB;

std::string sha256_of(File& file, FunctionRef<void()> poll) {
  sha256_ctx state;
  sha256_init(&state);
  std::vector<std::byte> buffer(kReadBytes);
  const uint64_t size = file.identity().size_bytes;
  for (uint64_t at = 0; at < size; at += kReadBytes) {
    poll();
    const auto bytes = std::span(buffer).first(std::min<uint64_t>(kReadBytes, size - at));
    file.read(bytes, at);
    file.drop_cached(at, at + bytes.size());
    sha256_update(&state, bytes.size(), reinterpret_cast<const uint8_t*>(bytes.data()));
  }
  std::array<uint8_t, SHA256_DIGEST_SIZE> digest;
  sha256_digest(&state, digest.size(), digest.data());
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace

std::optional<std::string> blob_sha256(FileSystem& files, const std::string& path) {
  const std::string target = files.link_target(path);
  const size_t slash = target.rfind('/');
  if (slash == std::string::npos || base_name(target.substr(0, slash)) != "blobs") return {};
  const std::string name = target.substr(slash + 1);
  const bool is_hex = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
  return is_hex && name.size() == 2 * SHA256_DIGEST_SIZE ? std::optional(name) : std::nullopt;
}

std::vector<std::string> own_directories(FileSystem& files, const std::string& directory) {
  std::vector<std::string> directories = {files.real_path(directory)};
  const size_t model = directories[0].rfind("/snapshots/");
  if (model == std::string::npos) return directories;
  const std::string cached = directories[0].substr(0, model);
  const std::string blobs = join_path(cached, "blobs");
  if (base_name(cached).starts_with("models--") && files.is_directory(blobs)) {
    directories.push_back(files.real_path(blobs));
  }
  return directories;
}

void check_sha256(FileSystem& files, const std::string& path, const std::string& expected,
                  FunctionRef<void()> poll) {
  const std::string got = sha256_of(*files.open(path), poll);
  if (got == expected) return;
  fail(Category::integrity, "the file's SHA-256 differs from the file's name in the cache",
       {.file = base_name(path), .expected = expected, .got = got});
}

}  // namespace modicum
