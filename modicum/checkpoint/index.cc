#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr size_t kLongestFileName = 255;

[[noreturn]] void refuse(Category category, const std::string& what, const std::string& file,
                         std::string_view tensor = {}, std::optional<uint64_t> offset = {}) {
  fail(category, what, {.file = file, .tensor = std::string(tensor), .offset = offset});
}

// R22: whether `name` can only be a file in the directory of the index.
bool is_shard_name(std::string_view name) {
  const bool odd = std::any_of(name.begin(), name.end(), [](char c) {
    return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  return !odd && name.size() <= kLongestFileName && name.ends_with(".safetensors");
}

class IndexParser {
 public:
  explicit IndexParser(Index& index) : index_(index) {}
  void parse(std::string_view text) {
    // A separate pass, so that invalid JSON is reported before any schema error.
    try {
      read_json(text, [](JsonValue&) {});
    } catch (const JsonError& error) {
      const bool duplicate = error.fault == JsonFault::duplicate;
      refuse(duplicate ? Category::index_dup : Category::index_json, error.what(), index_.name, {},
             error.offset);
    }
    try {
      reread_json(text, [this](JsonValue& value) { root(value); });
    } catch (const JsonError& error) {
      refuse(Category::index_schema, error.what(), index_.name, tensor_, error.offset);
    }
    if (index_.file_of.empty()) {
      refuse(Category::index_schema, "no weight_map, or an empty one", index_.name);
    }
    number_files_by_name();
  }

 private:
  void root(JsonValue& value) {
    value.object([this](std::string_view key, JsonValue& member) {
      if (key == "metadata") metadata(member);
      if (key != "weight_map") return;
      member.object([this](std::string_view tensor, JsonValue& file) { mapping(tensor, file); });
      tensor_.clear();
    });
  }

  void metadata(JsonValue& value) {
    value.object([this](std::string_view key, JsonValue& member) {
      if (key != "total_size") return;
      try {
        index_.total_size = member.integer();
      } catch (const JsonError& error) {
        index_.warnings.push_back(
            fmt::format("{}: total_size: {}", printable(index_.name), error.what()));
      }
    });
  }

  void mapping(std::string_view tensor, JsonValue& value) {
    tensor_ = tensor;
    const uint64_t offset = value.offset();
    const std::string file = value.string();
    if (!is_shard_name(file)) {
      fail(Category::index_path, "invalid file name in the index",
           {.file = index_.name,
            .tensor = tensor_,
            .offset = offset,
            .expected = "the name of a .safetensors file in the index's directory",
            .got = printable(file)});
    }
    const uint32_t number =
        seen_.try_emplace(file, static_cast<uint32_t>(seen_.size())).first->second;
    index_.file_of.emplace_back(tensor, number);
  }

  // Replaces the numbers of first occurrence by the files' positions in the order of their names.
  void number_files_by_name() {
    std::vector<uint32_t> renumbered(seen_.size());
    for (const auto& [name, number] : seen_) {
      renumbered[number] = static_cast<uint32_t>(index_.files.size());
      index_.files.push_back(name);
    }
    for (auto& entry : index_.file_of) entry.second = renumbered[entry.second];
  }

  Index& index_;
  std::string tensor_;
  std::map<std::string, uint32_t> seen_;  // number of each file, in order of first occurrence
};

// The manifest's tensors by name. Throws INDEX.DUP if two files have a tensor of the same name.
// Sorted by hash, because names have long common prefixes, so that comparing names is slow.
class Names {
 public:
  explicit Names(const Manifest& manifest) : manifest_(manifest) {
    const std::vector<StoredTensor>& tensors = manifest.tensors;
    rows_.reserve(tensors.size());
    for (const StoredTensor& stored : tensors) {
      rows_.push_back(
          {std::hash<std::string_view>()(stored.spec.fqn), static_cast<uint32_t>(rows_.size())});
    }
    std::sort(rows_.begin(), rows_.end(), [this](const Row& a, const Row& b) {
      if (a.hash != b.hash) return a.hash < b.hash;
      const int order = text(a).compare(text(b));
      return order != 0 ? order < 0 : a.tensor < b.tensor;
    });
    for (size_t i = 1; i < rows_.size(); ++i) {
      if (rows_[i - 1].hash != rows_[i].hash || text(rows_[i - 1]) != text(rows_[i])) continue;
      const Extent& extent = tensors[rows_[i - 1].tensor].at;
      const Extent& other = tensors[rows_[i].tensor].at;
      refuse(Category::index_dup,
             "the tensor is also in " + printable(manifest.files[extent.file].name),
             manifest.files[other.file].name, text(rows_[i]));
    }
  }

  const StoredTensor* find(std::string_view name) const {
    const size_t hash = std::hash<std::string_view>()(name);
    auto row = std::lower_bound(rows_.begin(), rows_.end(), hash,
                                [](const Row& r, size_t h) { return r.hash < h; });
    for (; row != rows_.end() && row->hash == hash; ++row) {
      if (text(*row) == name) return &manifest_.tensors[row->tensor];
    }
    return nullptr;
  }

 private:
  struct Row {
    size_t hash;
    uint32_t tensor;
  };
  std::string_view text(const Row& row) const { return manifest_.tensors[row.tensor].spec.fqn; }

  const Manifest& manifest_;
  std::vector<Row> rows_;
};

void warn_of_unmapped(const Manifest& manifest, const std::vector<bool>& is_mapped,
                      std::vector<std::string>& warnings) {
  std::vector<std::vector<size_t>> unmapped(manifest.files.size());
  for (size_t i = 0; i < is_mapped.size(); ++i) {
    if (!is_mapped[i]) unmapped[manifest.tensors[i].at.file].push_back(i);
  }
  for (size_t file = 0; file < unmapped.size(); ++file) {
    if (unmapped[file].empty()) continue;
    const TensorSpec& first = manifest.tensors[unmapped[file].front()].spec;
    warnings.push_back(fmt::format("{}: not in the index: {}; the first is {}",
                                   printable(manifest.files[file].name),
                                   counted(unmapped[file].size(), "tensor"), printable(first.fqn)));
  }
}

}  // namespace

Index read_index(File& file) {
  Index index;
  index.name = file.name();
  IndexParser(index).parse(read_text(file, kLongestText, Category::index_json));
  return index;
}

void prove_shards_exist(const Index& index, FileSystem& files, const std::string& directory) {
  std::vector<std::string> missing;
  for (const std::string& name : index.files) {
    if (!files.exists(join_path(directory, name))) missing.push_back(printable(name));
  }
  if (missing.empty()) return;
  fail(Category::index_missing_shard,
       fmt::format("files of {} are missing: {}", printable(index.name), fmt::join(missing, ", ")),
       {.file = missing.front(),
        .expected = fmt::format("{} files", index.files.size()),
        .got = fmt::format("{} files", index.files.size() - missing.size())});
}

void prove_index(const Index& index, const Manifest& manifest, std::vector<std::string>& warnings) {
  const Names names(manifest);
  std::vector<bool> is_mapped(manifest.tensors.size());
  uint64_t mapped_bytes = 0;
  for (const auto& [tensor, file] : index.file_of) {
    const StoredTensor* const stored = names.find(tensor);
    if (stored == nullptr || stored->at.file != file) {
      std::string what = "the tensor is not in the file that the index names";
      if (stored != nullptr) what += " but in " + printable(manifest.files[stored->at.file].name);
      refuse(Category::index_missing_tensor, what, index.files[file], tensor);
    }
    is_mapped[static_cast<size_t>(stored - manifest.tensors.data())] = true;
    mapped_bytes += stored->at.bytes();
  }
  warn_of_unmapped(manifest, is_mapped, warnings);
  if (!index.total_size || static_cast<uint64_t>(*index.total_size) == mapped_bytes) return;
  warnings.push_back(fmt::format("{}: total_size is {}, the tensors have {} bytes",
                                 printable(index.name), *index.total_size, mapped_bytes));
}

}  // namespace modicum
