#include "modicum/synth/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

namespace modicum {
namespace {

bool goes_before(const TensorSpec& a, const TensorSpec& b) {
  return std::tie(b.dtype, a.fqn) < std::tie(a.dtype, b.fqn);
}

}  // namespace

std::vector<std::vector<TensorSpec>> split_into_files(std::vector<TensorSpec> tensors,
                                                      uint64_t limit_bytes) {
  std::vector<std::vector<TensorSpec>> files;
  std::vector<TensorSpec> current;
  uint64_t current_bytes = 0;
  for (TensorSpec& spec : tensors) {
    const uint64_t bytes = bytes_of(spec.dtype, numel_of(spec.shape));
    if (bytes > limit_bytes) {
      files.emplace_back().push_back(std::move(spec));
      continue;
    }
    if (bytes > limit_bytes - current_bytes) {
      files.push_back(std::move(current));
      current.clear();
      current_bytes = 0;
    }
    current.push_back(std::move(spec));
    current_bytes += bytes;
  }
  if (!current.empty()) files.push_back(std::move(current));
  for (auto& file : files) std::sort(file.begin(), file.end(), goes_before);
  return files;
}

std::string shard_name(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  return fmt::format("model-{:05}-of-{:05}.safetensors", file + 1, files);
}

}  // namespace modicum
