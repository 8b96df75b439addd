// Models of the Hugging Face Hub: the local cache, and directories of their headers.
#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <regex>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

// Whether `name` can be an organisation, a model or a revision in the cache, and thus one component
// of a path there.
bool is_component(std::string_view name) {
  constexpr std::string_view kLegal =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.";
  return !name.empty() && name.front() != '.' &&
         name.find_first_not_of(kLegal) == std::string_view::npos;
}

std::string variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

// The home directory of a user, "": of this one. Empty if it is not known.
std::string home_of(const std::string& user) {
  if (std::string home = variable("HOME"); user.empty() && !home.empty()) return home;
  const passwd* const entry = user.empty() ? getpwuid(getuid()) : getpwnam(user.c_str());
  return entry == nullptr ? "" : entry->pw_dir;
}

// As huggingface_hub does, by expanduser and expandvars of os.path: replaces ~ and ~USER at the
// begin, $NAME and ${NAME}. What is not known stays.
std::string expanded(const std::string& path) {
  std::string text = path;
  if (path.starts_with('~')) {
    const size_t slash = std::min(path.find('/'), path.size());
    const std::string home = home_of(path.substr(1, slash - 1));
    if (!home.empty()) text = home + path.substr(slash);
  }
  static const std::regex kVariable(R"(\$(\w+|\{[^}]*\}))");
  std::string to;
  auto from = text.cbegin();
  for (std::sregex_iterator at(text.begin(), text.end(), kVariable), end; at != end; ++at) {
    const std::string whole = at->str(), word = (*at)[1];
    const std::string name = word.starts_with('{') ? word.substr(1, word.size() - 2) : word;
    to.append(from, text.cbegin() + at->position());
    const char* const value = std::getenv(name.c_str());
    to += value == nullptr ? whole : value;
    from = text.cbegin() + at->position() + at->length();
  }
  return to.append(from, text.cend());
}

// The text of a small file without the newlines at its end.
std::string line_of(FileSystem& files, const std::string& path) {
  std::string line = read_text(*files.open(path), kPageBytes, Category::io);
  while (!line.empty() && line.back() == '\n') line.pop_back();
  return line;
}

// nullopt for a malformed index: whoever opens the checkpoint gets the error.
std::optional<Index> index_at(FileSystem& files, const std::string& path) {
  try {
    return read_index(*files.open(path));
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Whether a file alone is a model's weights: not a part of several, and not the state of a trainer.
bool is_whole_model(const std::string& name) {
  constexpr std::array<std::string_view, 5> kOfTrainers = {
      "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin"};
  static const std::regex kPart(R"(.*-\d+-of-0*([2-9]|1\d)\d*\.safetensors)");
  if (name.ends_with(".safetensors")) return !std::regex_match(name, kPart);
  return is_pickle(name) &&
         std::find(kOfTrainers.begin(), kOfTrainers.end(), name) == kOfTrainers.end();
}

// Whether a snapshot has each file that its index names or, without an index, a file of weights.
// After a download that has ended early, some are missing, or are links that lead nowhere.
bool has_weights(FileSystem& files, const std::string& directory) {
  const auto is_there = [&](const std::string& name) {
    return files.exists(join_path(directory, name));
  };
  const std::vector<std::string> names = files.list(directory);
  bool has_index = false;
  for (const std::string& name : names) {
    if (!name.ends_with(".safetensors.index.json")) continue;
    const std::optional<Index> index = index_at(files, join_path(directory, name));
    has_index = has_index || index || !is_there(name);
    if (index && std::all_of(index->files.begin(), index->files.end(), is_there)) return true;
  }
  return !has_index && std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return is_whole_model(name) && is_there(name);
  });
}

}  // namespace

bool is_hub_name(std::string_view path) {
  const size_t slash = path.find('/');
  return slash != std::string_view::npos && is_component(path.substr(0, slash)) &&
         is_component(path.substr(slash + 1));
}

std::string cache_directory() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const std::string cache = variable(name); !cache.empty()) return expanded(cache);
  }
  const std::string home = variable("HF_HOME");
  if (!home.empty()) return join_path(expanded(home), "hub");
  const std::string caches = variable("XDG_CACHE_HOME");
  return join_path(expanded(caches.empty() ? "~/.cache" : caches), "huggingface/hub");
}

std::optional<CachedModel> cached_snapshot(FileSystem& files, const std::string& path) {
  if (!is_hub_name(path) && !is_component(path)) return std::nullopt;
  std::string name = path;
  if (const size_t slash = path.find('/'); slash != std::string::npos) name.replace(slash, 1, "--");
  const std::string model = join_path(cache_directory(), fmt::format("models--{}", name));
  const std::string reference = join_path(model, "refs/main");
  if (!files.exists(reference)) return std::nullopt;
  const std::string revision = line_of(files, reference);
  if (!is_component(revision)) {
    fail(Category::io, "refs/main of the cached model is not the name of a snapshot",
         {.file = reference});
  }
  const std::string directory = join_path(join_path(model, "snapshots"), revision);
  if (!files.is_directory(directory)) return std::nullopt;
  return CachedModel{directory, {path, revision}, has_weights(files, directory)};
}

std::optional<HubModel> model_of_headers(FileSystem& files, const std::string& directory) {
  const std::string path = join_path(directory, kHeadersFile);
  if (!files.exists(path)) return std::nullopt;
  const std::string line = line_of(files, path);
  const size_t at = line.find('@');
  if (at == std::string::npos || !is_hub_name(line.substr(0, at)) ||
      !is_component(line.substr(at + 1))) {
    fail(Category::format_schema, "not the model of a directory of headers",
         {.file = kHeadersFile, .expected = "ORG/NAME@REVISION", .got = printable(line)});
  }
  return HubModel{line.substr(0, at), line.substr(at + 1)};
}

bool is_uncached_name(FileSystem& files, const std::string& path) {
  try {
    if (!is_hub_name(path) || files.exists(path)) return false;
    const std::optional<CachedModel> snapshot = cached_snapshot(files, path);
    return !snapshot || !snapshot->is_whole;
  } catch (const Error&) {
    return false;  // whoever opens the path gets the error
  }
}

}  // namespace modicum
