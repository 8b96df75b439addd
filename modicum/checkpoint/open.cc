#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr std::string_view kShardEnding = ".safetensors";
constexpr std::string_view kIndexEnding = ".safetensors.index.json";
constexpr const char* kUsualFile = "model.safetensors";

// The file that defines the checkpoint: an index, or the only data file.
struct Source {
  std::string directory;
  std::string file;
  bool is_index = false;
  std::vector<std::string> names;  // of all files in the directory; empty if the user named a file
  std::optional<HubModel> hub;     // of a model in the cache
};

[[noreturn]] void refuse_path(Category category, const std::string& what, const std::string& path) {
  fail(category, what, {.file = base_name(path)});
}

std::vector<std::string> names_ending_in(std::string_view ending,
                                         const std::vector<std::string>& names) {
  std::vector<std::string> found;
  std::copy_if(names.begin(), names.end(), std::back_inserter(found),
               [ending](const std::string& name) { return name.ends_with(ending); });
  return found;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void refuse_headers(const HubModel& model, const std::string& directory) {
  fail(Category::unsupported,
       fmt::format("the directory has only the headers of {}, no values", model.name),
       {.file = base_name(directory),
        .expected = fmt::format("the files that `hf download {}` gets", model.name)});
}

// The program whose checkpoint a directory with these files is, of those that the Python package's
// `modicum.imports` reads; empty for others.
std::string_view foreign_kind(const std::vector<std::string>& names) {
  const auto any = [&](auto&& is_one) { return std::any_of(names.begin(), names.end(), is_one); };
  if (contains(names, ".metadata")) return "torch.distributed.checkpoint";
  if (contains(names, "pytorch_model_fsdp_0")) return "accelerate under FSDP";
  const bool has_step = contains(names, "latest") && any([](const std::string& name) {
                          return name.starts_with("global_step") || name == "zero_to_fp32.py";
                        });
  const bool is_step =
      any([](const std::string& name) { return name.ends_with("_optim_states.pt"); });
  return has_step || is_step ? "DeepSpeed's ZeRO" : "";
}

// What a directory without safetensors files should hold instead.
std::string expected_in(FileSystem& files, const std::string& directory,
                        const std::vector<std::string>& names) {
  if (const std::vector<int64_t> numbers = step_numbers(files, directory); !numbers.empty()) {
    return fmt::format("one checkpoint, such as step-{}: this is a run, which resume takes",
                       numbers.front());
  }
  if (!contains(names, kConfigFile)) return "a .safetensors file";
  return "a .safetensors file; of known models `modicum plan` needs config.json alone, and "
         "`modicum synth --sparse` writes files of their shapes";
}

// Refuses a directory of which the user must name one file, such as `candidate`. In the cache, and
// for headers, also says where it is: there the user has named only the model.
[[noreturn]] void refuse_ambiguous(FileSystem& files, const std::string& directory,
                                   const std::string& candidate, Facts facts,
                                   const std::string& what) {
  if (const auto model = model_of_headers(files, directory)) {
    facts.expected =
        fmt::format("a file in the directory that `hf download {}` prints", model->name);
  } else if (directory.starts_with(join_path(cache_directory(), "models--"))) {
    facts.expected = fmt::format("a file, such as {}", printable(join_path(directory, candidate)));
  }
  fail(Category::index_ambiguous, what, std::move(facts));
}

Source look_into(FileSystem& files, const std::string& directory) {
  std::vector<std::string> names = files.list(directory);
  std::erase(names, kHeadersFile);  // as in the directory with the values
  const std::vector<std::string> indexes = names_ending_in(kIndexEnding, names);
  const std::vector<std::string> shards = names_ending_in(kShardEnding, names);
  auto ambiguous = [&](const std::vector<std::string>& candidates, const char* why) {
    refuse_ambiguous(files, directory, candidates.front(), {.file = base_name(directory)},
                     fmt::format("{}; name one: {}", why,
                                 printable(fmt::format("{}", fmt::join(candidates, ", ")))));
  };
  if (indexes.size() > 1) ambiguous(indexes, "several indexes in one directory");
  if (indexes.size() == 1) return {directory, indexes.front(), true, names};
  if (shards.size() == 1) return {directory, shards.front(), false, names};
  // Not ambiguous: other programs write files such as optimizer.safetensors next to a model.
  if (contains(shards, kUsualFile)) return {directory, kUsualFile, false, names};
  if (shards.size() > 1) ambiguous(shards, "several safetensors files and no index");
  if (const std::string_view kind = foreign_kind(names); !kind.empty()) {
    fail(Category::unsupported,
         fmt::format("a directory of {}: `modicum convert` of the Python package converts it, and "
                     "modicum.imports.import_checkpoint turns it into a checkpoint of a run",
                     kind),
         {.file = base_name(directory), .expected = "a .safetensors file"});
  }
  const auto pickle = std::find_if(names.begin(), names.end(), is_pickle);
  if (pickle == names.end()) {
    const auto listed = std::span(names).first(std::min<size_t>(names.size(), 5));
    fail(Category::io, "no safetensors file in the directory",
         {.file = base_name(directory),
          .expected = expected_in(files, directory, names),
          .got = names.empty() ? "no file"
                               : printable(fmt::format("{}{}", fmt::join(listed, ", "),
                                                       names.size() > 5 ? ", ..." : ""))});
  }
  refuse_path(Category::format_pickle,
              "the directory has pickle files, which are never read, and no safetensors file",
              *pickle);
}

[[noreturn]] void refuse_part(const std::string& name) {
  const char* const without =
      is_hub_name(name) ? " (without them `uvx modicum plan` reads the headers)" : "";
  fail(Category::io, "the cache has only a part of the model",
       {.expected = fmt::format("the files that `hf download {}` puts into {}{}", name,
                                cache_directory(), without),
        .got = name});
}

Source find_source(FileSystem& files, const std::string& path) {
  if (files.is_directory(path)) return look_into(files, path);
  if (files.exists(path)) {
    const std::string name = base_name(path);
    if (is_pickle(name)) refuse_path(Category::format_pickle, "pickle files are never read", path);
    return {parent_path(path), name, name.ends_with(".index.json"), {}};
  }
  if (const auto snapshot = cached_snapshot(files, path)) {
    if (!snapshot->is_whole) refuse_part(path);
    Source source = look_into(files, snapshot->directory);
    source.hub = snapshot->model;
    return source;
  }
  // Nothing is at `path`. `open` throws an error that says why; the forms that a path may have are
  // added to that error.
  try {
    files.open(path);
  } catch (const Error& error) {
    Facts facts = error.facts();
    facts.expected = fmt::format(
        "a directory, a file, or ORG/NAME that hf download has put into {}", cache_directory());
    if (is_hub_name(path))
      facts.expected += " (of any other, `uvx modicum plan` reads the headers)";
    facts.got = printable(path);
    fail(error.category(), error.what_happened(), std::move(facts));
  }
  refuse_path(Category::io, "the path appeared while it was opened", path);
}

// R29: refuses index X.safetensors.index.json next to a file X.safetensors that it does not name.
void prove_unambiguous(FileSystem& files, const Source& source, const Index& index) {
  constexpr std::string_view kSuffix = ".index.json";
  const std::string single = source.file.substr(0, source.file.size() - kSuffix.size());
  if (contains(index.files, single) || !files.exists(join_path(source.directory, single))) return;
  refuse_ambiguous(files, source.directory, source.file, {.file = source.file},
                   fmt::format("both {} and an index of other files; name one", printable(single)));
}

void add_file(Checkpoint& checkpoint, const std::string& name) {
  Manifest& manifest = checkpoint.manifest;
  const std::unique_ptr<File> file = checkpoint.files->open(join_path(checkpoint.directory, name));
  Header header = read_header(*file, static_cast<uint32_t>(manifest.files.size()));
  if (manifest.files.empty()) checkpoint.metadata = std::move(header.metadata);
  manifest.files.push_back(std::move(header.file));
  // Moved, not copied: a single file may have millions of tensors.
  if (manifest.tensors.capacity() == 0) {
    manifest.tensors = std::move(header.tensors);
    return;
  }
  std::move(header.tensors.begin(), header.tensors.end(), std::back_inserter(manifest.tensors));
}

// `is_named`: the user's path is that of the index, so a file next to it makes nothing ambiguous.
void add_shards(Checkpoint& checkpoint, const Source& source, bool is_named) {
  const std::unique_ptr<File> file =
      checkpoint.files->open(join_path(source.directory, source.file));
  const Index index = read_index(*file);
  if (!is_named) prove_unambiguous(*checkpoint.files, source, index);
  prove_shards_exist(index, *checkpoint.files, source.directory);
  checkpoint.warnings = index.warnings;
  checkpoint.manifest.files.reserve(index.files.size());
  checkpoint.manifest.tensors.reserve(index.file_of.size());
  for (const std::string& name : index.files) add_file(checkpoint, name);
  prove_index(index, checkpoint.manifest, checkpoint.warnings);
  checkpoint.manifest.tensors.shrink_to_fit();
}

// Without a config.json the defaults apply. If it exists but can't be read, its members are
// unknown, and unread_config records the fault.
void add_config(Checkpoint& checkpoint) {
  FileSystem& files = *checkpoint.files;
  try {
    if (!is_listed(files, checkpoint.directory, kConfigFile)) return;
    const auto file = files.open(join_path(checkpoint.directory, kConfigFile));
    checkpoint.config =
        parse_config(read_text(*file, kLongestConfig, Category::format_limit), checkpoint.warnings);
  } catch (const Error& error) {
    checkpoint.config = unread_config(error, checkpoint.warnings);
  }
}

}  // namespace

bool is_pickle(std::string_view name) {
  constexpr std::array<std::string_view, 8> kEndings = {".bin", ".pt",     ".pth",    ".ckpt",
                                                        ".pkl", ".pickle", ".distcp", ".metadata"};
  return std::any_of(kEndings.begin(), kEndings.end(),
                     [name](std::string_view ending) { return name.ends_with(ending); });
}

bool is_link(FileSystem& files, const std::string& path) {
  const std::optional<DirectoryEntry> entry = files.entry(path);
  return entry && entry->is_link;
}

bool is_listed(FileSystem& files, const std::string& directory, const std::string& name) {
  if (files.exists(join_path(directory, name))) return true;
  return files.is_directory(directory) && contains(files.list(directory), name);
}

// Leaves out inodes and times, so that nodes with separate copies have equal identities.
Digest identity_of(const Manifest& manifest) {
  Hasher hasher;
  hasher.add(manifest.files.size());
  for (const DataFile& file : manifest.files) {
    hasher.add(file.name).add(file.identity.size_bytes);
  }
  hasher.add(manifest.tensors.size());
  for (const StoredTensor& stored : manifest.tensors) {
    hasher.add(stored.spec.fqn).add(static_cast<uint64_t>(stored.spec.dtype));
    hasher.add(stored.spec.shape);
    hasher.add(uint64_t{stored.at.file}).add(stored.at.begin).add(stored.at.end);
  }
  // Block sizes come from config.json. With another block size the same codes have other values.
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const std::optional<BlockScale>& scale = manifest.tensors[i].scale;
    if (!scale) continue;
    hasher.add(i).add(uint64_t{scale->tensor});
    for (const int64_t size : scale->block) hasher.add(size);
  }
  return hasher.digest();
}

// With this limit, sums over a manifest's tensors can't overflow.
void require_countable(const Manifest& manifest) {
  const uint64_t bytes = manifest.data_bytes();
  if (bytes <= kMaxModelBytes) return;
  const auto largest = std::max_element(
      manifest.tensors.begin(), manifest.tensors.end(),
      [](const StoredTensor& a, const StoredTensor& b) { return a.at.bytes() < b.at.bytes(); });
  fail(Category::format_overflow, "the checkpoint's tensors are too large",
       {.file = manifest.files[largest->at.file].name,
        .tensor = largest->spec.fqn,
        .expected = fmt::format("at most {} bytes together", kMaxModelBytes),
        .got = fmt::format("{} bytes", bytes)});
}

std::optional<std::string> config_alone(FileSystem& files, const std::string& path) {
  if (!files.is_directory(path)) {
    const bool is_config = path.ends_with(".json") && !path.ends_with(".index.json");
    return is_config && files.exists(path) ? std::optional(path) : std::nullopt;
  }
  const std::vector<std::string> names = files.list(path);
  const bool has_weights = std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name.ends_with(kShardEnding) || name.ends_with(kIndexEnding) || is_pickle(name);
  });
  if (has_weights || !contains(names, kConfigFile) || !foreign_kind(names).empty() ||
      !step_numbers(files, path).empty()) {
    return std::nullopt;
  }
  return join_path(path, kConfigFile);
}

Checkpoint unwritten_checkpoint(FileSystem& files, const std::string& config,
                                const std::string& text, const FileSpecs& tensors) {
  Checkpoint checkpoint;
  checkpoint.files = &files;
  checkpoint.directory = parent_path(config);
  checkpoint.manifest = output_manifest(tensors);
  checkpoint.config = parse_config(text, checkpoint.warnings);
  pair_scales(checkpoint.manifest, checkpoint.config, checkpoint.warnings);
  checkpoint.manifest.identity = identity_of(checkpoint.manifest);
  return checkpoint;
}

std::string defining_file(FileSystem& files, const std::string& directory) {
  return look_into(files, directory).file;
}

Checkpoint open_checkpoint(FileSystem& files, const std::string& path, Record record,
                           Content content) {
  std::optional<RecordComparison> comparison;
  if (record != Record::ignored) comparison.emplace(files, path, record == Record::in_save);
  const Source source = find_source(files, path);
  Checkpoint checkpoint;
  checkpoint.files = &files;
  checkpoint.directory = source.directory;
  checkpoint.hub = source.hub;
  if (const auto model = model_of_headers(files, source.directory)) {
    if (content == Content::values) refuse_headers(*model, source.directory);
    checkpoint.hub = model;
  }
  if (source.is_index) {
    add_shards(checkpoint, source, base_name(path) == source.file);
  } else {
    add_file(checkpoint, source.file);
  }
  require_countable(checkpoint.manifest);
  if (comparison) comparison->add_to(checkpoint.manifest);
  warn_of_unread_files(source.names, checkpoint.manifest, checkpoint.warnings);
  add_config(checkpoint);
  pair_scales(checkpoint.manifest, checkpoint.config, checkpoint.warnings);
  checkpoint.manifest.identity = identity_of(checkpoint.manifest);
  return checkpoint;
}

std::unique_ptr<File> open_data_file(const Checkpoint& checkpoint, uint32_t file) {
  const std::vector<DataFile>& files = checkpoint.manifest.files;
  const DataFile& proven = files[checked_index("file", file, files.size())];
  std::unique_ptr<File> opened =
      checkpoint.files->open(join_path(checkpoint.directory, proven.name));
  require_unchanged(*opened, proven.identity);
  return opened;
}

}  // namespace modicum
