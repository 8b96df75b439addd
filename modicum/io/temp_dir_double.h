// A directory on the real file system for a test.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace modicum {

// A new, empty directory; the destructor removes it with its content. The constructor throws if the
// directory can't be made, for example on a full disk.
class TempDir {
 public:
  TempDir() : path_(testing::TempDir() + "modicum-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), "mkdtemp " + path_);
    }
    path_ = std::filesystem::canonical(path_);  // TMPDIR may be a link
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace modicum
