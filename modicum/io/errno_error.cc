#include "modicum/io/errno_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace modicum {
namespace {

struct Row {
  int error;
  std::string_view name;
};

// Instead of strerrorname_np(3), which needs glibc 2.32: we support older versions.
constexpr std::array<Row, 35> kNames = {{
    {EACCES, "EACCES"},
    {EAGAIN, "EAGAIN"},
    {EBADF, "EBADF"},
    {EBUSY, "EBUSY"},
    {EDQUOT, "EDQUOT"},
    {EEXIST, "EEXIST"},
    {EFAULT, "EFAULT"},
    {EFBIG, "EFBIG"},
    {EINTR, "EINTR"},
    {EINVAL, "EINVAL"},
    {EIO, "EIO"},
    {EISDIR, "EISDIR"},
    {ELOOP, "ELOOP"},
    {EMFILE, "EMFILE"},
    {EMLINK, "EMLINK"},
    {ENAMETOOLONG, "ENAMETOOLONG"},
    {ENFILE, "ENFILE"},
    {ENODEV, "ENODEV"},
    {ENOENT, "ENOENT"},
    {ENOLINK, "ENOLINK"},
    {ENOMEM, "ENOMEM"},
    {ENOSPC, "ENOSPC"},
    {ENOSYS, "ENOSYS"},
    {ENOTCONN, "ENOTCONN"},
    {ENOTDIR, "ENOTDIR"},
    {ENOTEMPTY, "ENOTEMPTY"},
    {ENXIO, "ENXIO"},
    {EOPNOTSUPP, "EOPNOTSUPP"},
    {EOVERFLOW, "EOVERFLOW"},
    {EPERM, "EPERM"},
    {EREMOTEIO, "EREMOTEIO"},
    {EROFS, "EROFS"},
    {ESTALE, "ESTALE"},
    {ETIMEDOUT, "ETIMEDOUT"},
    {EXDEV, "EXDEV"},
}};

std::string name_of(int error) {
  const auto row = std::find_if(kNames.begin(), kNames.end(),
                                [error](const Row& r) { return r.error == error; });
  return row != kNames.end() ? std::string(row->name) : fmt::format("errno {}", error);
}

}  // namespace

std::string errno_text(int error) {
  return fmt::format("{} ({})", name_of(error), std::generic_category().message(error));
}

void fail_errno(int error, std::string_view what_failed, Facts facts) {
  const bool is_full = error == ENOSPC || error == EDQUOT;
  fail(is_full ? Category::no_space : Category::io,
       fmt::format("{}: {}", what_failed, errno_text(error)), std::move(facts));
}

}  // namespace modicum
