#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr uint64_t kLargestIndex = 100'000'000;
constexpr size_t kLongestFileName = 255;

[[noreturn]] void refuse(Category category, const std::string& what, const std::string& file,
                         std::string_view tensor = {}, std::optional<uint64_t> offset = {}) {
  Facts facts;
  facts.file = file;
  facts.tensor = tensor;
  facts.offset = offset;
  fail(category, what, facts);
}

// R22: a file beside the index and nothing else, decided before anything is opened.
bool is_shard_name(std::string_view name) {
  const bool odd = std::any_of(name.begin(), name.end(), [](char c) {
    return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
  });
  return !odd && name.size() <= kLongestFileName && name.ends_with(".safetensors");
}

class IndexParser {
 public:
  explicit IndexParser(Index& index) : index_(index) {}
  void parse(std::string_view text);

 private:
  void root(JsonValue& value);
  void metadata(JsonValue& value);
  void mapping(std::string_view tensor, JsonValue& value);
  void number_files_by_name();

  Index& index_;
  std::string tensor_;
  std::map<std::string, uint32_t> seen_;  // shard -> its number, in the order met
};

void IndexParser::parse(std::string_view text) {
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
  std::sort(index_.file_of.begin(), index_.file_of.end());
}

void IndexParser::root(JsonValue& value) {
  value.object([this](std::string_view key, JsonValue& member) {
    if (key == "metadata") metadata(member);
    if (key != "weight_map") return;
    member.object([this](std::string_view tensor, JsonValue& file) { mapping(tensor, file); });
    tensor_.clear();
  });
}

void IndexParser::metadata(JsonValue& value) {
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

void IndexParser::mapping(std::string_view tensor, JsonValue& value) {
  tensor_ = tensor;
  const uint64_t offset = value.offset();
  const std::string file = value.string();
  if (!is_shard_name(file)) {
    Facts facts;
    facts.file = index_.name;
    facts.tensor = tensor_;
    facts.offset = offset;
    facts.expected = "the name of a .safetensors file beside the index";
    facts.got = printable(file);
    fail(Category::index_path, "the index leads elsewhere", facts);
  }
  const uint32_t number =
      seen_.try_emplace(file, static_cast<uint32_t>(seen_.size())).first->second;
  index_.file_of.emplace_back(tensor, number);
}

void IndexParser::number_files_by_name() {
  std::vector<uint32_t> renumbered(seen_.size());
  for (const auto& [name, number] : seen_) {
    renumbered[number] = static_cast<uint32_t>(index_.files.size());
    index_.files.push_back(name);
  }
  for (auto& entry : index_.file_of) entry.second = renumbered[entry.second];
}

// Indices into the manifest's tensors, by name; a name that two files have is INDEX.DUP.
std::vector<uint32_t> order_by_name(const Manifest& manifest) {
  const std::vector<Stored>& tensors = manifest.tensors;
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const int by_name = tensors[a].spec.fqn.compare(tensors[b].spec.fqn);
    return by_name != 0 ? by_name < 0 : a < b;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const Stored& one = tensors[order[i - 1]];
    const Stored& other = tensors[order[i]];
    if (one.spec.fqn != other.spec.fqn) continue;
    const std::string what =
        fmt::format("the tensor is also in {}", printable(manifest.files[one.at.file].name));
    refuse(Category::index_dup, what, manifest.files[other.at.file].name, other.spec.fqn);
  }
  return order;
}

void warn_of_unmapped(const Manifest& manifest, const std::vector<std::vector<uint32_t>>& unmapped,
                      std::vector<std::string>& warnings) {
  for (size_t file = 0; file < unmapped.size(); ++file) {
    if (unmapped[file].empty()) continue;
    warnings.push_back(fmt::format("{}: {} tensors are not in the index, the first is {}",
                                   printable(manifest.files[file].name), unmapped[file].size(),
                                   printable(manifest.tensors[unmapped[file].front()].spec.fqn)));
  }
}

}  // namespace

std::string read_text(File& file) {
  std::string text(file.identity().size_bytes, '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

Index read_index(File& file) {
  Index index;
  index.name = file.name();
  if (file.identity().size_bytes > kLargestIndex) {
    refuse(Category::index_json, "the index is over 100,000,000 bytes", index.name);
  }
  IndexParser(index).parse(read_text(file));
  return index;
}

void prove_shards_exist(const Index& index, FileSystem& files, const std::string& directory) {
  std::vector<std::string> missing;
  for (const std::string& name : index.files) {
    if (!files.exists(join_path(directory, name))) missing.push_back(printable(name));
  }
  if (missing.empty()) return;
  Facts facts;
  facts.file = missing.front();
  facts.expected = fmt::format("{} files", index.files.size());
  facts.got = fmt::format("{} files", index.files.size() - missing.size());
  fail(Category::index_missing_shard,
       fmt::format("files of {} are missing: {}", printable(index.name), fmt::join(missing, ", ")),
       facts);
}

void prove_index(const Index& index, const Manifest& manifest, std::vector<std::string>& warnings) {
  const std::vector<uint32_t> order = order_by_name(manifest);
  std::vector<std::vector<uint32_t>> unmapped(manifest.files.size());
  uint64_t mapped_bytes = 0;
  auto next = order.begin();
  auto pass = [&](auto is_before) {
    for (; next != order.end() && is_before(manifest.tensors[*next].spec.fqn); ++next) {
      unmapped[manifest.tensors[*next].at.file].push_back(*next);
    }
  };
  // Both sides are sorted by name.
  for (const auto& [tensor, file] : index.file_of) {
    const std::string& name = tensor;
    pass([&name](const std::string& fqn) { return fqn < name; });
    const std::string& shard = index.files[file];
    const bool found = next != order.end() && manifest.tensors[*next].spec.fqn == tensor;
    const Extent at = found ? manifest.tensors[*next].at : Extent{};
    if (!found || at.file != file) {
      const std::string there =
          found ? fmt::format(" but {}", printable(manifest.files[at.file].name)) : "";
      refuse(Category::index_missing_tensor,
             fmt::format("the file that the index names does not hold the tensor{}", there), shard,
             tensor);
    }
    mapped_bytes += at.bytes();
    ++next;
  }
  pass([](const std::string&) { return true; });
  warn_of_unmapped(manifest, unmapped, warnings);
  if (!index.total_size || static_cast<uint64_t>(*index.total_size) == mapped_bytes) return;
  warnings.push_back(fmt::format("{}: total_size is {}, the tensors have {} bytes",
                                 printable(index.name), *index.total_size, mapped_bytes));
}

}  // namespace modicum
