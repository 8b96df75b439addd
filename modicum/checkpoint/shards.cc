// The files of a checkpoint to be written: which tensor is in which, their headers and extents.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

// Descending dtypes, then ascending names. DType has the order of the safetensors library, in which
// larger dtypes come last.
bool goes_before(const TensorSpec& a, const TensorSpec& b) {
  return std::tie(b.dtype, a.fqn) < std::tie(a.dtype, b.fqn);
}

void sort_as_written(FileSpecs& files) {
  for (auto& file : files) std::sort(file.begin(), file.end(), goes_before);
}

// The metadata that save_pretrained of transformers writes. Older versions of from_pretrained
// refuse a file without it.
const std::map<std::string, std::string>& metadata() {
  static const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};
  return kMetadata;
}

uint64_t json_bytes(const std::string& text) {
  JsonWriter out;
  return out.value(text).text().size();
}

// Checks the length of output_index, which is written after the data.
void require_index(const Manifest& manifest) {
  if (manifest.files.size() == 1) return;
  constexpr uint64_t kMaxAround = 128;  // bytes without the members of weight_map
  uint64_t bytes = kMaxAround;
  std::vector<uint64_t> of_file;
  for (const DataFile& file : manifest.files) of_file.push_back(json_bytes(file.name));
  for (const StoredTensor& stored : manifest.tensors) {
    bytes += json_bytes(stored.spec.fqn) + of_file[stored.at.file] + std::string_view(":,").size();
  }
  require_readable(bytes, kIndexFile);
}

}  // namespace

FileSpecs split_into_files(std::vector<TensorSpec> tensors, uint64_t limit_bytes) {
  FileSpecs files;
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
  sort_as_written(files);
  return files;
}

FileSpecs group_by_file(std::vector<TensorSpec> tensors, std::span<const uint32_t> file_of) {
  MODICUM_ASSERT(file_of.size() == tensors.size());
  std::map<uint32_t, std::vector<TensorSpec>> grouped;
  for (size_t i = 0; i < tensors.size(); ++i) grouped[file_of[i]].push_back(std::move(tensors[i]));
  FileSpecs files;
  for (auto& file : grouped) files.push_back(std::move(file.second));
  sort_as_written(files);
  return files;
}

std::string shard_name(size_t file, size_t files, std::string_view stem) {
  if (files == 1) return fmt::format("{}.safetensors", stem);
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, file + 1, files);
}

bool is_weights_name(std::string_view name) {
  if (name == kIndexFile) return true;
  constexpr std::string_view kEnding = ".safetensors", kShard = "-#####-of-#####";
  if (!name.starts_with(kModelStem) || !name.ends_with(kEnding)) return false;
  name.remove_prefix(kModelStem.size());
  name.remove_suffix(kEnding.size());
  return name.empty() || std::equal(name.begin(), name.end(), kShard.begin(), kShard.end(),
                                    [](char c, char pattern) {
                                      return pattern == '#' ? c >= '0' && c <= '9' : c == pattern;
                                    });
}

std::string_view stem_of(const Manifest& manifest) {
  const bool is_adapter =
      !manifest.files.empty() && manifest.files.front().name.starts_with(kAdapterStem);
  return is_adapter ? kAdapterStem : kModelStem;
}

Manifest output_manifest(FileSpecs files, std::string_view stem) {
  if (files.empty()) fail(Category::usage, "there is no tensor to save");
  if (stem == kAdapterStem && files.size() > 1) {
    fail(Category::unsupported, "an adapter must stay a single file; give a larger --shard-size",
         {.file = shard_name(0, 1, stem),
          .expected = "1 file",
          .got = fmt::format("{} files", files.size())});
  }
  Manifest manifest;
  size_t count = 0;
  for (const auto& file : files) count += file.size();
  manifest.tensors.reserve(count);
  for (size_t f = 0; f < files.size(); ++f) {
    DataFile file{.name = shard_name(f, files.size(), stem)};
    file.header_bytes = safetensors_header(files[f], file.name, metadata()).size();
    uint64_t end = file.header_bytes;
    for (TensorSpec& spec : files[f]) {
      const uint64_t begin = end;
      end += bytes_of(spec.dtype, numel_of(spec.shape));
      manifest.tensors.push_back({std::move(spec), {static_cast<uint32_t>(f), begin, end}});
    }
    files[f] = {};  // frees them: a model may have millions
    file.identity.size_bytes = end;
    manifest.files.push_back(std::move(file));
  }
  // The order of an opened manifest. It differs from that of `files` for empty tensors, which have
  // equal extents.
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return std::tie(a.at.file, a.at.begin, a.at.end, a.spec.fqn) <
                     std::tie(b.at.file, b.at.begin, b.at.end, b.spec.fqn);
            });
  require_countable(manifest);
  require_index(manifest);
  manifest.identity = identity_of(manifest);
  return manifest;
}

std::string output_header(const Manifest& manifest, uint32_t file) {
  const DataFile& described = manifest.files[file];
  HeaderText text(metadata(), described.header_bytes);
  for (const StoredTensor& stored : manifest.tensors) {
    if (stored.at.file != file) continue;
    text.add(stored.spec, stored.at.begin - described.header_bytes,
             stored.at.end - described.header_bytes);
  }
  return text.take(described.name);
}

std::string output_index(const Manifest& manifest) {
  if (manifest.files.size() == 1) return "";
  std::vector<std::pair<std::string, std::string>> file_of_tensor;
  for (const StoredTensor& stored : manifest.tensors) {
    file_of_tensor.emplace_back(stored.spec.fqn, manifest.files[stored.at.file].name);
  }
  std::sort(file_of_tensor.begin(), file_of_tensor.end());
  return index_json(file_of_tensor, manifest.data_bytes());
}

}  // namespace modicum
