// Warnings about weights in the directory that are not read: spare shards, pickles, adapters.
#include <fmt/format.h>

#include <algorithm>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr const char* kAdapterConfig = "adapter_config.json";

// Adds one warning that names the first of these files.
void warn_of(const std::vector<std::string>& unread, std::string_view what,
             std::vector<std::string>& warnings) {
  if (unread.empty()) return;
  warnings.push_back(fmt::format("not read: {} in the directory; the first is {}",
                                 counted(unread.size(), what), printable(unread.front())));
}

}  // namespace

void warn_of_unread_files(const std::vector<std::string>& names, const Manifest& manifest,
                          std::vector<std::string>& warnings) {
  const auto is_read = [&](const std::string& name) {
    return std::any_of(manifest.files.begin(), manifest.files.end(),
                       [&](const DataFile& file) { return file.name == name; });
  };
  std::vector<std::string> shards, pickles;
  bool has_adapter = false;
  for (const std::string& name : names) {
    if (name.ends_with(".safetensors") && !is_read(name)) shards.push_back(name);
    if (name.starts_with("pytorch_model") && name.ends_with(".bin")) pickles.push_back(name);
    if (name == kAdapterConfig) has_adapter = true;
  }
  warn_of(shards, "safetensors file", warnings);
  warn_of(pickles, "pickle file", warnings);
  if (!has_adapter) return;
  const bool is_adapter = stem_of(manifest) == kAdapterStem;
  warnings.push_back(fmt::format("{}: {}", kAdapterConfig,
                                 is_adapter
                                     ? "the tensors are an adapter's, not a whole model's"
                                     : "the adapter in the model's directory is not applied"));
}

}  // namespace modicum
