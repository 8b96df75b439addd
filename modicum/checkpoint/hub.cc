// Models of the Hugging Face Hub: the local cache, and directories of their headers.
#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
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

bool has_weights(FileSystem& files, const std::string& directory) {
  if (!files.is_directory(directory)) return false;
  const std::vector<std::string> names = files.list(directory);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name.ends_with(".safetensors") || is_pickle(name);
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
  if (!is_hub_name(path)) return std::nullopt;
  const size_t slash = path.find('/');
  const std::string model =
      join_path(cache_directory(),
                fmt::format("models--{}--{}", path.substr(0, slash), path.substr(slash + 1)));
  const std::string reference = join_path(model, "refs/main");
  if (!files.exists(reference)) return std::nullopt;
  const std::string revision = line_of(files, reference);
  if (!is_component(revision)) {
    fail(Category::io, "refs/main of the cached model is not the name of a snapshot",
         {.file = reference});
  }
  const std::string directory = join_path(join_path(model, "snapshots"), revision);
  if (!has_weights(files, directory)) return std::nullopt;
  return CachedModel{directory, {path, revision}};
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
    return is_hub_name(path) && !files.exists(path) && !cached_snapshot(files, path);
  } catch (const Error&) {
    return false;  // whoever opens the path gets the error
  }
}

}  // namespace modicum
