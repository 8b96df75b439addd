#include "modicum/stream/file_sink.h"

#include <algorithm>
#include <cstring>

namespace modicum {
namespace {

// Whether all bytes are zero: the first is, and each equals the next. memcmp is vectorised.
bool is_zero(std::span<const std::byte> bytes) noexcept {
  return bytes[0] == std::byte{0} &&
         std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

// Calls `fn(begin, end)` for the ranges of `bytes` that must be written, where bytes[0] is byte
// `at` of the file. The bytes of a file page are left out if all of them are zero, since pages that
// are not written read as zero.
template <typename Fn>
void for_each_written(std::span<const std::byte> bytes, uint64_t at, const Fn& fn) {
  uint64_t begin = 0;
  for (uint64_t page = 0; page < bytes.size();) {
    const uint64_t end = std::min<uint64_t>(bytes.size(), round_up(at + page + 1, kPageBytes) - at);
    if (is_zero(bytes.subspan(page, end - page))) {
      if (page > begin) fn(begin, page);
      begin = end;
    }
    page = end;
  }
  if (begin < bytes.size()) fn(begin, bytes.size());
}

}  // namespace

FileSink::FileSink(const Plan& plan, const Manifest& saved, std::span<const uint32_t> places,
                   const SaveFiles& to, bool keeps_holes)
    : plan_(plan),
      saved_(saved),
      places_(places),
      keeps_holes_(keeps_holes),
      digested_(plan, 0),
      writer_(to.files, to.directory) {
  MODICUM_ASSERT(places.size() == plan.recipe->targets.size());
  MODICUM_ASSERT(plan.ranks() == 1);
}

void FileSink::copy(uint32_t target, int64_t at, std::span<const std::byte> elements) {
  const StoredTensor& stored = saved_.tensors[places_[target]];
  const uint64_t begin = stored.at.begin + bytes_of(stored.spec.dtype, at);
  MODICUM_ASSERT(begin + elements.size() <= stored.at.end);
  digested_.add(target, at, elements);
  const std::string& name = saved_.files[stored.at.file].name;
  const auto write = [&](uint64_t from, uint64_t to) {
    const std::lock_guard lock(mutex_);
    writer_.write(name, begin + from, elements.subspan(from, to - from));
  };
  if (keeps_holes_) return for_each_written(elements, begin, write);
  write(0, elements.size());
}

void FileSink::fetch(uint32_t target, int64_t, std::span<std::byte>) {
  fail(Category::unsupported, "the elements of this tensor can't be read back",
       {.tensor = buffer_name(plan_, target)});
}

}  // namespace modicum
