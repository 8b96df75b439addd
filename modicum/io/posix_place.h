// Where PosixFileSystem makes, replaces and removes names. Internal to `io`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "modicum/io/descriptor.h"

namespace modicum {

// A directory and a name in it. Whatever becomes of the directory's path, the name is in this
// directory.
struct Place {
  Descriptor directory;  // O_PATH
  std::string name;
};

// Opens the directory of `path`, component by component, and follows no link. Returns nullopt if a
// component is missing. Throws CONFLICT, with the component's name, if one is a symbolic link; IO.
// `what_failed`: begins the message, as for fail_errno.
std::optional<Place> find_place(const std::string& path, std::string_view what_failed);
// As find_place, but throws IO (ENOENT) if a component is missing.
Place open_place(const std::string& path, std::string_view what_failed);

}  // namespace modicum
